// What C++ has no words for: single PTX instructions. A test runs everything else on a CPU with other
// definitions of these.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int FP16 = 0, BF16 = 1, FP32 = 2;

// ---- memory

// What is read or written once should leave the L2 first.
__device__ __forceinline__ u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Volatile, or the compiler moves loads behind `wait_for_front`.
__device__ __forceinline__ void load16(u32* to, const void* from, u64 policy) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "l"(from), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void store8(void* to, uint2 value, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(value.x),
               "r"(value.y), "l"(policy)
               : "memory");
}

// ---- launches that overlap: the kernel in front may still run until `wait_for_front` returns.

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ int read_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void write_release(int* at, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// ---- numbers

// The FP16 number in the low half of x.
__device__ __forceinline__ float from_fp16(u32 x) {
  float out;
  asm("{.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;}"
      : "=f"(out)
      : "r"(x));
  return out;
}

// The larger of a and |b|; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  float out;
  asm("{.reg .f32 t;\n\tabs.f32 t, %2;\n\tmax.NaN.f32 %0, %1, t;}" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// The same for the pairs of 16-bit numbers in a and b.
template <int TYPE>
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
  u32 out;
  if constexpr (TYPE == BF16)
    asm("{.reg .b32 t;\n\tabs.bf16x2 t, %2;\n\tmax.NaN.bf16x2 %0, %1, t;}"
        : "=r"(out)
        : "r"(a), "r"(b));
  else
    asm("{.reg .b32 t;\n\tabs.f16x2 t, %2;\n\tmax.NaN.f16x2 %0, %1, t;}"
        : "=r"(out)
        : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ u32 e4m3x4(float a, float b, float c, float d) {
  u32 out;
  asm("{.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};}"
      : "=r"(out)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return out;
}

// The sum of the squares of four INT8 codes.
__device__ __forceinline__ int squares(u32 codes) {
  int out;
  asm("dp4a.s32.s32 %0, %1, %1, %2;" : "=r"(out) : "r"(codes), "r"(0));
  return out;
}

__device__ __forceinline__ u32 bf16x2(float a, float b) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(out) : "f"(a), "f"(b));
  return out;
}

__device__ __forceinline__ u32 fp16x2(float a, float b) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(out) : "f"(a), "f"(b));
  return out;
}
