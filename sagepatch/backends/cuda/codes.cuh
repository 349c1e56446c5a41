// Numbers to codes: largest magnitudes that keep NaN, scales, INT8, E4M3 and FP16 codes. Arithmetic
// is that of numerics/quantize.py, operation by operation: no product is fused with a sum here.

constexpr float MOST_INT8 = 127.f;
// Below this the reciprocal 127 / amax leaves fp32: such a group counts as zeros.
constexpr float TINY = 1e-35f;
// Beyond these a product of scales leaves fp32; a softmax is one-hot there anyway.
constexpr float MOST_Q_SCALE = 1e16f, MOST_K_SCALE = 1e15f;
// 1.5 * 2^23: adding it to |x| < 2^22 leaves rint(x), half to even, in the low bits.
constexpr float RINT = 12582912.f;
constexpr u32 INFINITE = 0x7F800000;

// The larger of a and |b|; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  float out;
  asm("{.reg .f32 t;\n\tabs.f32 t, %2;\n\tmax.NaN.f32 %0, %1, t;}" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// The largest over `width` neighbouring threads, in each of them.
template <int WIDTH>
__device__ __forceinline__ float largest(float x) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2) {
    x = larger(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
  }
  return x;
}

struct Scaling {
  float inverse, scale;
};

// largest_code / amax and amax / largest_code: both 0 for a group of zeros, the scale NaN unless
// amax is finite. A number over a tensor is to torch the reciprocal times the number.
__device__ __forceinline__ Scaling scaling(float amax, float largest_code) {
  if (amax < TINY) return {0.f, 0.f};
  return {__fmul_rn(__fdiv_rn(1.f, amax), largest_code),
          __fadd_rn(__fdiv_rn(amax, largest_code), amax * 0.f)};
}

// Powers of two for FP16: the least that brings amax to `range` or under, 1 where it is already.
__device__ __forceinline__ Scaling power_scaling(float amax, float range) {
  const u32 bits = __float_as_uint(amax);
  float scale = 1.f;
  if (amax > range && bits < INFINITE) {
    const u32 ratio = __float_as_uint(__fdiv_rn(amax, range));
    scale = __uint_as_float((ratio + 0x7FFFFF) & INFINITE);
  }
  if (bits > INFINITE) scale = amax;  // NaN
  return {__fdiv_rn(1.f, scale), scale};
}

__device__ __forceinline__ float at_most(float scale, float most) {
  return scale > most ? most : scale;  // NaN stays
}

// Four INT8 codes of x * inverse.
__device__ __forceinline__ u32 int8x4(float a, float b, float c, float d, float inverse) {
  const u32 low = __byte_perm(__float_as_uint(__fadd_rn(__fmul_rn(a, inverse), RINT)),
                              __float_as_uint(__fadd_rn(__fmul_rn(b, inverse), RINT)), 0x0040);
  const u32 high = __byte_perm(__float_as_uint(__fadd_rn(__fmul_rn(c, inverse), RINT)),
                               __float_as_uint(__fadd_rn(__fmul_rn(d, inverse), RINT)), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

__device__ __forceinline__ u32 e4m3x4(float a, float b, float c, float d) {
  u32 out;
  asm("{.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};}"
      : "=r"(out)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
}

__device__ __forceinline__ u32 fp16x2(float a, float b) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(out) : "f"(a), "f"(b));
  return out;
}
