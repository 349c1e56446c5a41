// Single PTX instructions that the mma.sync kernels are made of: asynchronous copies, ldmatrix, the
// products, exp2 and the packing of codes. A test runs everything else on a CPU with other
// definitions of these.
//
// Fragments of mma.m16n8 with rows of 32 bytes along the summed axis (k = 16 for FP16, 32 for 8-bit
// codes, 64 for INT4), by the PTX ISA; lane = 4 g + t:
//   A  register 0: row g, bytes 4 t..4 t + 3; 1: row g + 8; 2: row g, bytes 16 + 4 t..; 3: row g + 8
//   B  register 0: column g, bytes 4 t..4 t + 3; 1: bytes 16 + 4 t..
//   C  registers 0, 1: row g, columns 2 t, 2 t + 1; 2, 3: row g + 8
// which is what ldmatrix gives for 8 rows of 16 bytes: lane 4 g + t gets bytes 4 t.. of row g.

#include "ptx.cuh"

// ---- shared memory

__device__ __forceinline__ u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}

__device__ __forceinline__ u32 shared_address(const void* at) {
  return (u32)__cvta_generic_to_shared(at);
}

// 16 bytes from global to shared memory; zeros where not `there`.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the latest N groups of this thread's copies are there.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four matrices of 8 rows of 16 bytes: lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// The same, each matrix of 8 x 8 16-bit numbers transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// ---- products: d = a b + c, and d = a b

#define PRODUCT(TYPES, D, C)                                                                       \
  asm volatile("mma.sync.aligned." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "         \
               "{%10, %11, %12, %13};"                                                             \
               : D(d[0]), D(d[1]), D(d[2]), D(d[3])                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), C(c[0]), C(c[1]),   \
                 C(c[2]), C(c[3]))

// The same with two registers of pairs of FP16 sums.
#define HALF_PRODUCT(TYPES)                                                                        \
  asm volatile("mma.sync.aligned." TYPES " {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"        \
               : "=r"(d[0]), "=r"(d[1])                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]),          \
                 "r"(c[1]))

template <int BITS>
__device__ __forceinline__ void mma_scores(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                           const int (&c)[4]) {
  if constexpr (BITS == 8)
    PRODUCT("m16n8k32.row.col.s32.s8.s8.s32", "=r", "r");
  else
    PRODUCT("m16n8k64.row.col.s32.s4.s4.s32", "=r", "r");
}

__device__ __forceinline__ void mma_i8(int (&d)[4], const u32* a, u32 b0, u32 b1,
                                       const int (&c)[4]) {
  PRODUCT("m16n8k32.row.col.s32.s8.s8.s32", "=r", "r");
}

__device__ __forceinline__ void mma_e4m3(float (&d)[4], const u32* a, u32 b0, u32 b1,
                                         const float (&c)[4]) {
  PRODUCT("m16n8k32.row.col.f32.e4m3.e4m3.f32", "=f", "f");
}

__device__ __forceinline__ void mma_e4m3(u32 (&d)[2], const u32* a, u32 b0, u32 b1,
                                         const u32 (&c)[2]) {
  HALF_PRODUCT("m16n8k32.row.col.f16.e4m3.e4m3.f16");
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const u32* a, u32 b0, u32 b1,
                                        const float (&c)[4]) {
  PRODUCT("m16n8k16.row.col.f32.f16.f16.f32", "=f", "f");
}

__device__ __forceinline__ void mma_f16(u32 (&d)[2], const u32* a, u32 b0, u32 b1,
                                        const u32 (&c)[2]) {
  HALF_PRODUCT("m16n8k16.row.col.f16.f16.f16.f16");
}

#undef PRODUCT
#undef HALF_PRODUCT

// The same number, of which the compiler knows nothing: what follows from it is worked out again
// instead of kept in registers.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- numbers

__device__ __forceinline__ float exp2_mufu(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float log2_mufu(float x) {
  float out;
  asm("lg2.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// One of the two FP16 numbers in x.
template <int HALF>
__device__ __forceinline__ float from_fp16_pair(u32 x) {
  if constexpr (!HALF) return from_fp16(x);
  float out;
  asm("{.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, high;}"
      : "=f"(out)
      : "r"(x));
  return out;
}
