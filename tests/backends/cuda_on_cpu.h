// CUDA C++ of the pre-pass as C++ of a CPU: blocks one after another, the threads of a block as
// fibers that switch at every barrier and exchange. What ptx.cuh holds for a GPU, this holds.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

using std::max;
using std::min;

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
constexpr int FP16 = 0, BF16 = 1, FP32 = 2;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __CUDA_ARCH__ 900

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;

// ---- fibers

constexpr int MOST_THREADS = 1024, STACK_BYTES = 1 << 18, MOST_TURNS = 1 << 20;
static ucontext_t fibers[MOST_THREADS], between;
static char* stacks[MOST_THREADS];
static bool ended[MOST_THREADS];
static int threads;

struct Barrier { int waiting, round; };
static Barrier of_block, of_warp[MOST_THREADS / 32];

static void let_others_run() {
  const int me = threadIdx.x;
  swapcontext(&fibers[me], &between);
  threadIdx.x = me;
}

static void wait_at(Barrier& barrier, int members) {
  const int round = barrier.round;
  if (++barrier.waiting == members) {
    barrier.waiting = 0;
    barrier.round++;
  } else {
    while (barrier.round == round) let_others_run();
  }
}

static std::function<void()> body;

static void fiber() {
  body();
  ended[threadIdx.x] = true;
  swapcontext(&fibers[threadIdx.x], &between);
}

static void run_blocks(int blocks, int threads_of_block, std::function<void()> kernel) {
  body = kernel;
  threads = threads_of_block;
  gridDim.x = blocks;
  for (int block = 0; block < blocks; block++) {
    blockIdx.x = block;
    of_block = {};
    for (Barrier& barrier : of_warp) barrier = {};
    for (int t = 0; t < threads; t++) {
      if (!stacks[t]) stacks[t] = static_cast<char*>(malloc(STACK_BYTES));
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks[t];
      fibers[t].uc_stack.ss_size = STACK_BYTES;
      fibers[t].uc_link = nullptr;
      makecontext(&fibers[t], fiber, 0);
      ended[t] = false;
    }
    int turns = 0;
    for (int left = threads; left; turns++) {
      if (turns > MOST_TURNS) {
        fprintf(stderr, "block %d waits for something that never comes\n", block);
        abort();
      }
      left = 0;
      for (int t = 0; t < threads; t++)
        if (!ended[t]) {
          left++;
          threadIdx.x = t;
          swapcontext(&between, &fibers[t]);
        }
    }
  }
}

// ---- what CUDA C++ has built in

static void __syncthreads() { wait_at(of_block, threads); }

template <class T>
static T exchange(T value, int from) {
  static T shared[MOST_THREADS];
  Barrier& warp = of_warp[threadIdx.x / 32];
  shared[threadIdx.x] = value;
  wait_at(warp, 32);
  const T other = shared[from];
  wait_at(warp, 32);
  return other;
}

static float __shfl_xor_sync(u32, float value, int step) {
  return exchange(value, threadIdx.x ^ step);
}

static float __shfl_sync(u32, float value, int lane, int width) {
  return exchange(value, threadIdx.x / width * width + lane % width);
}

static u32 __ballot_sync(u32, bool vote) {
  static bool votes[MOST_THREADS];
  Barrier& warp = of_warp[threadIdx.x / 32];
  votes[threadIdx.x] = vote;
  wait_at(warp, 32);
  u32 word = 0;
  for (int lane = 0; lane < 32; lane++) word |= u32(votes[threadIdx.x / 32 * 32 + lane]) << lane;
  wait_at(warp, 32);
  return word;
}

static bool __syncthreads_or(bool vote) {
  static bool votes[MOST_THREADS];
  votes[threadIdx.x] = vote;
  __syncthreads();
  const bool any = std::any_of(votes, votes + threads, [](bool v) { return v; });
  __syncthreads();
  return any;
}

static bool __syncthreads_and(bool vote) { return !__syncthreads_or(!vote); }

static int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}

static void atomicMax(int* at, int value) { *at = max(*at, value); }
static void __threadfence() {}
static void __nanosleep(int) { let_others_run(); }

template <class T>
static T __ldcg(const T* at) { return *at; }

template <class To, class From>
static To same_bits(From x) {
  To out;
  static_assert(sizeof(To) == sizeof(From));
  memcpy(&out, &x, sizeof(out));
  return out;
}

static float __uint_as_float(u32 x) { return same_bits<float>(x); }
static float __int_as_float(int x) { return same_bits<float>(x); }
static u32 __float_as_uint(float x) { return same_bits<u32>(x); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static u32 __umulhi(u32 a, u32 b) { return u64(a) * b >> 32; }

static u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = u64(high) << 32 | low;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= u32(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

// ---- what ptx.cuh has for a GPU

static void must(bool holds, const char* what) {
  if (!holds) {
    fprintf(stderr, "%s\n", what);
    abort();
  }
}

static u64 evict_first() { return 0; }
static u64 evict_normal() { return 0; }

static void load16(u32* to, const void* from, u64) {
  must(uintptr_t(from) % 16 == 0, "a load of 16 bytes is not aligned");
  memcpy(to, from, 16);
}

static void store8(void* to, uint2 value, u64) {
  must(uintptr_t(to) % 8 == 0, "a store of 8 bytes is not aligned");
  memcpy(to, &value, 8);
}

static void let_next_begin() {}
static void wait_for_front() {}
static int read_acquire(const int* at) { return *at; }
static void write_release(int* at, int value) { *at = value; }

static float from_fp16(u32 x) { return float(same_bits<_Float16>(uint16_t(x))); }

static u32 fp16x2(float a, float b) {
  return same_bits<uint16_t>(_Float16(a)) | u32(same_bits<uint16_t>(_Float16(b))) << 16;
}

static int squares(u32 codes) {
  int sum = 0;
  for (int i = 0; i < 4; i++) {
    const int code = (signed char)(codes >> 8 * i);
    sum += code * code;
  }
  return sum;
}

static u32 bf16x2(float a, float b) {
  const auto rounded = [](float x) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  };
  return rounded(a) | rounded(b) << 16;
}

static float larger(float a, float b) {
  b = std::fabs(b);
  if (std::isnan(a) || std::isnan(b)) return __uint_as_float(0x7FFFFFFF);
  return a > b ? a : b;
}

template <int TYPE>
static u32 larger_pair(u32 a, u32 b) {
  constexpr u32 infinite = TYPE == BF16 ? 0x7F80 : 0x7C00;
  u32 out = 0;
  for (int shift : {0, 16}) {
    const u32 x = a >> shift & 0xFFFF, y = b >> shift & 0x7FFF;
    out |= (x > infinite || y > infinite ? 0x7FFF : max(x, y)) << shift;
  }
  return out;
}

static u32 to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  const u32 sign = std::signbit(x) ? 0x80 : 0;
  int exponent = 0;
  const auto spread = [&](float y) {
    std::frexp(y, &exponent);
    exponent = max(exponent - 1, -6);
  };
  float size = min(std::fabs(x), 448.f);
  spread(size);
  size = std::ldexp(std::nearbyint(std::ldexp(size, 3 - exponent)), exponent - 3);
  spread(size);
  // Steps of 2^-9 below the least normal number, eight steps a binade above.
  const u32 steps = u32(std::ldexp(size, 3 - exponent));
  return sign | (steps < 8 ? steps : u32(exponent + 7) << 3 | (steps - 8));
}

static u32 e4m3x4(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}
