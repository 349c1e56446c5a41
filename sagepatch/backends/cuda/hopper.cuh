// What Hopper kernels are made of: barriers, tensor copies, products in flight, exp2 and the packing
// of codes. Knows no attention. Self-contained: no header is needed.

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

struct alignas(64) TensorMap { uint64_t opaque[16]; };

template <bool B> struct Flag { static constexpr bool value = B; };

// ---- barriers, copies, registers

static __device__ __forceinline__ uint32_t shared_address(const void* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

static __device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

static __device__ __forceinline__ void load_box(uint32_t to, const TensorMap* map, uint32_t barrier,
                                                int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

static __device__ __forceinline__ void load_box(uint32_t to, const TensorMap* map, uint32_t barrier,
                                                int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y),
      "r"(z), "r"(w)
      : "memory");
}

// Shared memory that threads wrote becomes visible to products and copies.
static __device__ __forceinline__ void share_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// All threads of one warpgroup that computes, number `consumer`; barriers 1 and 2 are the turns.
static __device__ __forceinline__ void meet(int consumer) {
  asm volatile("bar.sync %0, 128;" ::"r"(3 + consumer) : "memory");
}

// Whether all threads of a warpgroup that computes say so.
static __device__ __forceinline__ bool all_of_us(bool mine, int consumer) {
  int all;
  asm volatile("{.reg .pred mine, all; setp.ne.b32 mine, %1, 0;"
               "bar.red.and.pred all, %2, 128, mine; selp.b32 %0, 1, 0, all;}"
               : "=r"(all) : "r"((int)mine), "r"(3 + consumer) : "memory");
  return __all_sync(~0u, all);  // which the compiler knows to be uniform
}

static __device__ __forceinline__ void take_turn(int barrier) {
  asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void give_turn(int barrier) {
  asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void mma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of a product in flight: nothing that touches them may move across this.
template <int N> static __device__ __forceinline__ void hold(int (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
template <int N> static __device__ __forceinline__ void hold(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
template <int N> static __device__ __forceinline__ void hold(float (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(a[i])::"memory");
}

// A shared memory descriptor in two halves: the lower one moves with the operand.
static __device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t high) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high));
  return d;
}

// Where the byte at `at` of rows of `bytes` lies that are swizzled.
static __device__ __forceinline__ uint32_t swizzled(uint32_t at, int bytes) {
  return at ^ (at >> 7 & (bytes / 16 - 1)) << 4;
}

static __host__ __device__ constexpr uint32_t swizzle_mode(int bytes) {
  return (bytes == 128 ? 1u : bytes == 64 ? 2u : 3u) << 30;
}

// ---- arithmetic

static __device__ __forceinline__ float exp2_mufu(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x from y = (x + 118) / 128 clamped to [0, 1], by a parabola through (0, 1): 0.74 % off at most,
// against the 6 % of rounding to E4M3. The FMA pipe is idler than the one that has exp2.
constexpr float POLY_SCALE = 1.0f / 128.0f;
constexpr float POLY_SHIFT = 118.0f;
static __device__ __forceinline__ float exp2_parabola(float y) {
  constexpr float magic = 12582912.0f - POLY_SHIFT;  // 1.5 * 2^23: the sum's low bits are round(x)
  float t = __fmaf_rn(y, 128.0f, magic);
  float f = __fmaf_rn(y, 128.0f, -__fadd_rn(t, -magic));  // [-0.5, 0.5]
  float p = __fmaf_rn(__fmaf_rn(f, 0.2402265f, 0.6955f), f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
}

static __device__ __forceinline__ float fma_clamped(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

static __device__ __forceinline__ int max3(int a, int b, int c) { return max(max(a, b), c); }

static __device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

static __device__ __forceinline__ uint32_t pack_half(float a, float b) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b));
  return r;
}

static __device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b));
  return r;
}

static __device__ __forceinline__ float half_at(uint32_t pair, int which) {
  float r;
  if (which)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(pair));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
  return r;
}
