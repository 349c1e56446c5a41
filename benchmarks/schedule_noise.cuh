// Pseudo-random delays around everything by which threads wait for each other, and an end to waits
// that nothing ends. Included by the sources that schedule_noise.py makes, behind what defines the
// functions below: each of their calls becomes the same call with delays around it. No program that
// serves has this file.

typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

__device__ uint32_t noise_seed;     // of a launch; 0: no delays
__device__ uint32_t noise_gave_up;  // 1 from when a wait took too long: all end at once then

constexpr uint32_t MOST_WAIT_NS = 500000000;

static __device__ __forceinline__ uint32_t mixed(uint32_t x) {
  // The finaliser of MurmurHash3.
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

// How a warp is delayed: `most` nanoseconds, a power of two less 1, where the bits `rare` of a random
// number are 0.
struct Delays {
  uint32_t state, most, rare;
};

// Seeds take turns at four kinds: a little everywhere; rarely, but longer than a tile takes; one
// warpgroup slower than the others; every warp at a rate of its own.
static __device__ __forceinline__ Delays delays_of(uint32_t seed, uint32_t block, uint32_t warp,
                                                   uint32_t groups) {
  const uint32_t of_block = mixed(seed * 0x9E3779B9u + block), own = mixed(of_block + warp);
  if (seed == 0) return {own, 0, 0};
  switch (seed & 3) {
    case 0: return {own, 255, 0};
    case 1: return {own, 8191, 0x700};
    case 2: return {own, warp / 4 == of_block % groups ? 2047u : 0u, 0};
    default: return {own, (64u << (own & 7)) - 1, (own >> 8 & 7) << 8};
  }
}

static __device__ __forceinline__ void delay(uint32_t x, uint32_t most, uint32_t rare) {
  const uint32_t ns = x & rare ? 0 : x >> 16 & most;
  asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory");
}

#ifdef SHARED_BYTES
// Delays of the warps lie at the end of the attention's dynamic shared memory, which nothing else uses
// (its launcher counts 1024 bytes and the kernel needs few of them), so that they take no registers
// between two delays: products in flight need all.
constexpr int NOISE_WARPS = 16;
static __device__ __forceinline__ volatile Delays* noise_of(uint32_t warp) {
  extern __shared__ __align__(1024) uint8_t all_of_it[];  // every such array begins in one place
  return reinterpret_cast<volatile Delays*>(all_of_it + SHARED_BYTES) - NOISE_WARPS + warp;
}

static __device__ __forceinline__ void noise_begins() {
  if (threadIdx.x % 32 == 0) {
    const uint32_t warp = threadIdx.x / 32;
    const Delays own =
        delays_of(*(volatile uint32_t*)&noise_seed, blockIdx.x, warp, blockDim.x / 128);
    volatile Delays* at = noise_of(warp);
    at->state = own.state;
    at->most = own.most;
    at->rare = own.rare;
  }
  __syncthreads();
}

// The next delay of this warp at a place of the source. No branch: products may be in flight.
static __device__ __forceinline__ void noise(uint32_t place) {
  volatile Delays* own = noise_of(threadIdx.x / 32);
  const uint32_t state = own->state * 1664525u + place;
  own->state = state;
  delay(mixed(state), own->most, own->rare);
}
#else
// A block of the pre-pass has few places, and comes to each once.
static __device__ __forceinline__ void noise(uint32_t place) {
  const Delays own = delays_of(*(volatile uint32_t*)&noise_seed, blockIdx.x, threadIdx.x / 32,
                               blockDim.x / 128);
  delay(mixed(own.state + place), own.most, own.rare);
}
#endif

static __device__ __forceinline__ uint32_t now_ns() {
  uint32_t ns;
  asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(ns));
  return ns;
}

// No trap: with one the compiler takes fewer registers, and products wait for each other.
static __device__ __forceinline__ bool gives_up(uint32_t since) {
  volatile uint32_t* gave_up = &noise_gave_up;
  if (now_ns() - since > MOST_WAIT_NS) *gave_up = 1;
  return *gave_up;
}

#ifdef SHARED_BYTES
// `wait` of hopper.cuh with an end.
static __device__ __forceinline__ void wait_for_long(uint32_t barrier, uint32_t parity) {
  const uint32_t since = now_ns();
  uint32_t done = 0;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done && !gives_up(since));
}

#define wait(...) (noise(__LINE__), wait_for_long(__VA_ARGS__), noise(__LINE__ + 5000))
#define arrive(...) (noise(__LINE__), arrive(__VA_ARGS__), noise(__LINE__ + 5000))
#define expect_bytes(...) (noise(__LINE__), expect_bytes(__VA_ARGS__), noise(__LINE__ + 5000))
#define load_box(...) (noise(__LINE__), load_box(__VA_ARGS__))
#define mma_commit() (mma_commit(), noise(__LINE__))
#define share_writes() (noise(__LINE__), share_writes(), noise(__LINE__ + 5000))
#define meet(...) (noise(__LINE__), meet(__VA_ARGS__), noise(__LINE__ + 5000))
#define take_turn(...) (noise(__LINE__), take_turn(__VA_ARGS__), noise(__LINE__ + 5000))
#define give_turn(...) (noise(__LINE__), give_turn(__VA_ARGS__), noise(__LINE__ + 5000))
#endif

#define __threadfence() (noise(__LINE__), __threadfence(), noise(__LINE__ + 5000))
#define __syncthreads() (noise(__LINE__), __syncthreads(), noise(__LINE__ + 5000))
#define wait_for_front() (noise(__LINE__), wait_for_front(), noise(__LINE__ + 5000))
#define let_next_begin() (let_next_begin(), noise(__LINE__))
#define write_release(...) (noise(__LINE__), write_release(__VA_ARGS__))
