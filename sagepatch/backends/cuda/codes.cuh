// Numbers to codes: largest magnitudes that keep NaN, scales, INT8, E4M3 and FP16 codes. Arithmetic
// is that of numerics/quantize.py, operation by operation: no product is fused with a sum here.

constexpr float MOST_INT8 = 127.f, MOST_INT4 = 7.f;
// Below this the reciprocal 127 / amax leaves fp32: such a group counts as zeros.
constexpr float TINY = 1e-35f;
// Beyond these a product of scales leaves fp32; a softmax is one-hot there anyway.
constexpr float MOST_Q_SCALE = 1e16f, MOST_K_SCALE = 1e15f;
// 1.5 * 2^23: adding it to |x| < 2^22 leaves rint(x), half to even, in the low bits.
constexpr float RINT = 12582912.f;
constexpr u32 INFINITE = 0x7F800000;

// Largest magnitudes of the channels of many tokens, eight a thread.
template <int TYPE>
struct Peaks {
  Eight<TYPE> most;

  __device__ __forceinline__ void add(const Eight<TYPE>& x) {
    if constexpr (TYPE == FP32) {
#pragma unroll
      for (int i = 0; i < 8; i++) most.word[i] = __float_as_uint(larger(most[i], x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) most.word[i] = larger_pair<TYPE>(most.word[i], x.word[i]);
    }
  }
};

// The largest magnitude of eight channels.
template <int TYPE>
__device__ __forceinline__ float peak_of(const Eight<TYPE>& x) {
  if constexpr (TYPE == FP32) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) most = larger(most, x[i]);
    return most;
  } else {
    Eight<TYPE> most;
    most.word[0] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most.word[0] = larger_pair<TYPE>(most.word[0], x.word[i]);
    return larger(most[0], most[1]);
  }
}

constexpr int min_of(int a, int b) { return a < b ? a : b; }

template <bool CHOICE, class A, class B>
struct Either {
  using type = A;
};

template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

struct Largest {
  static __device__ __forceinline__ float of(float a, float b) { return larger(a, b); }
};

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// All of `WIDTH` neighbouring threads, in each of them.
template <class OP, int WIDTH>
__device__ __forceinline__ float over_threads(float x) {
#pragma unroll
  for (int step = WIDTH / 2; step > 0; step /= 2)
    x = OP::of(x, __shfl_xor_sync(0xFFFFFFFF, x, step));
  return x;
}

// N values at once, over `WIDTH` neighbouring threads, with N + log2(WIDTH / N) exchanges: thread
// number t of these is left with value number t / (WIDTH / N).
template <class OP, int WIDTH, int N>
__device__ __forceinline__ float over_threads(const float (&x)[N]) {
  if constexpr (N == 1) {
    return over_threads<OP, WIDTH>(x[0]);
  } else {
    const bool upper = threadIdx.x & (WIDTH / 2);
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float kept = upper ? x[N / 2 + i] : x[i], given = upper ? x[i] : x[N / 2 + i];
      half[i] = OP::of(kept, __shfl_xor_sync(0xFFFFFFFF, given, WIDTH / 2));
    }
    return over_threads<OP, WIDTH / 2>(half);
  }
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

// Eight INT4 codes of x * inverse, the first in the lowest four bits.
__device__ __forceinline__ u32 int4x8(const float (&x)[8], float inverse) {
  u32 out = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    out |= (__float_as_uint(__fadd_rn(__fmul_rn(x[i], inverse), RINT)) & 15) << 4 * i;
  return out;
}
