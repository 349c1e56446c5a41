// What mma.cuh holds for a GPU, for a CPU: the threads of a warp publish their registers, meet, and
// each works out its own. Behind cuda_on_cpu.h. Layouts are those of the PTX ISA, "Matrix fragments
// for mma.m16n8k16, .m16n8k32, .m16n8k64" and "ldmatrix", written anew from there.
#include <vector>

struct float2 { float x, y; };

constexpr int SHARED_MOST = 232 << 10;
alignas(128) static u8 shared_memory[SHARED_MOST];
static u8* dynamic_shared() { return shared_memory; }
static u32 shared_address(const void* at) { return u32((const u8*)at - shared_memory); }

// ---- copies happen when they are waited for, not before

struct Copy { u32 to; const void* from; bool there; };
static std::vector<std::vector<Copy>> copies[MOST_THREADS];

static void copy16(u32 to, const void* from, bool there = true) {
  must(to % 16 == 0 && uintptr_t(from) % 16 == 0, "a copy of 16 bytes is not aligned");
  must(to + 16 <= SHARED_BYTES, "a copy ends behind the shared memory");
  auto& mine = copies[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  mine.back().push_back({to, from, there});
}

static void commit_copies() {
  auto& mine = copies[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  mine.emplace_back();
}

template <int N>
static void wait_for_copies() {
  auto& mine = copies[threadIdx.x];
  // The last entry is the group that is not committed yet.
  while (mine.size() > N + 1) {
    for (const Copy& c : mine.front())
      if (c.there)
        memcpy(shared_memory + c.to, c.from, 16);
      else
        memset(shared_memory + c.to, 0, 16);
    mine.erase(mine.begin());
  }
}

// ---- exchange inside a warp, one meeting each: two sets of registers take turns

struct Registers { u32 r[8]; };
static Registers published[2][MOST_THREADS];
static int turn[MOST_THREADS];

static const Registers* publish(const Registers& mine) {
  const int set = turn[threadIdx.x] ^= 1;
  published[set][threadIdx.x] = mine;
  wait_at(of_warp[threadIdx.x / 32], 32);
  return published[set] + threadIdx.x / 32 * 32;
}

static void load_matrices(u32 (&to)[4], u32 at) {
  must(at % 16 == 0 && at + 16 <= SHARED_BYTES, "ldmatrix of no row");
  const Registers* lanes = publish({{at}});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++)
    memcpy(&to[i], shared_memory + lanes[8 * i + lane / 4].r[0] + lane % 4 * 4, 4);
}

static void load_matrices_transposed(u32 (&to)[4], u32 at) {
  must(at % 16 == 0 && at + 16 <= SHARED_BYTES, "ldmatrix of no row");
  const Registers* lanes = publish({{at}});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    uint16_t pair[2];
    for (int x = 0; x < 2; x++)
      memcpy(&pair[x], shared_memory + lanes[8 * i + lane % 4 * 2 + x].r[0] + lane / 4 * 2, 2);
    memcpy(&to[i], pair, 4);
  }
}

// ---- products

static float from_e4m3(u8 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  if ((code & 0x7F) == 0x7F) size = NAN;
  return code & 0x80 ? -size : size;
}

struct S8 {
  static constexpr int k = 32;
  typedef int Number;
  static int at(const u8* row, int i) { return int8_t(row[i]); }
};
struct S4 {
  static constexpr int k = 64;
  typedef int Number;
  static int at(const u8* row, int i) {
    const int nibble = row[i / 2] >> i % 2 * 4 & 15;
    return nibble < 8 ? nibble : nibble - 16;
  }
};
struct E4M3 {
  static constexpr int k = 32;
  typedef double Number;
  static double at(const u8* row, int i) { return from_e4m3(row[i]); }
};
struct F16 {
  static constexpr int k = 16;
  typedef double Number;
  static double at(const u8* row, int i) {
    uint16_t bits;
    memcpy(&bits, row + 2 * i, 2);
    return float(same_bits<_Float16>(bits));
  }
};

// The four sums of a thread, without what is there already: rows g and g + 8, columns 2 t, 2 t + 1.
template <class T>
static void multiply(typename T::Number (&sums)[4], const u32* a, u32 b0, u32 b1) {
  const Registers* lanes = publish({{a[0], a[1], a[2], a[3], b0, b1}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int e = 0; e < 4; e++) {
    u8 row[32], column[32];
    for (int x = 0; x < 4; x++) {
      memcpy(row + 4 * x, &lanes[4 * g + x].r[e / 2], 4);
      memcpy(row + 16 + 4 * x, &lanes[4 * g + x].r[2 + e / 2], 4);
      const Registers& other = lanes[4 * (2 * t + e % 2) + x];
      memcpy(column + 4 * x, &other.r[4], 4);
      memcpy(column + 16 + 4 * x, &other.r[5], 4);
    }
    sums[e] = 0;
    for (int i = 0; i < T::k; i++) sums[e] += T::at(row, i) * T::at(column, i);
  }
}

static void product(int (&d)[4], const u32* a, u32 b0, u32 b1, const int (&c)[4], auto type) {
  int sums[4];
  multiply<decltype(type)>(sums, a, b0, b1);
  for (int e = 0; e < 4; e++) d[e] = c[e] + sums[e];
}

static void product(float (&d)[4], const u32* a, u32 b0, u32 b1, const float (&c)[4], auto type) {
  double sums[4];
  multiply<decltype(type)>(sums, a, b0, b1);
  for (int e = 0; e < 4; e++) d[e] = float(c[e] + sums[e]);
}

static void product(u32 (&d)[2], const u32* a, u32 b0, u32 b1, const u32 (&c)[2], auto type) {
  double sums[4];
  multiply<decltype(type)>(sums, a, b0, b1);
  for (int i = 0; i < 2; i++)
    d[i] = fp16x2(float(from_fp16(c[i] & 0xFFFF) + sums[2 * i]),
                  float(from_fp16(c[i] >> 16) + sums[2 * i + 1]));
}

template <int BITS>
static void mma_scores(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  if constexpr (BITS == 8)
    product(d, a, b0, b1, c, S8());
  else
    product(d, a, b0, b1, c, S4());
}

static void mma_i8(int (&d)[4], const u32* a, u32 b0, u32 b1, const int (&c)[4]) {
  product(d, a, b0, b1, c, S8());
}

template <class Sum, int N>
static void mma_e4m3(Sum (&d)[N], const u32* a, u32 b0, u32 b1, const Sum (&c)[N]) {
  product(d, a, b0, b1, c, E4M3());
}

template <class Sum, int N>
static void mma_f16(Sum (&d)[N], const u32* a, u32 b0, u32 b1, const Sum (&c)[N]) {
  product(d, a, b0, b1, c, F16());
}

// ---- numbers, and what CUDA C++ has built in beside cuda_on_cpu.h

static float exp2_mufu(float x) { return std::exp2(x); }
static float log2_mufu(float x) { return std::log2(x); }

static float __fmul_rd(float a, float b) {
  const double exact = double(a) * b;
  const float near = float(exact);
  return near > exact ? std::nextafter(near, -HUGE_VALF) : near;
}

static float __fsub_ru(float a, float b) {
  const double exact = double(a) - b;
  const float near = float(exact);
  return near < exact ? std::nextafter(near, HUGE_VALF) : near;
}

static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __fdividef(float a, float b) { return a / b; }

template <class T>
static T __ldg(const T* at) { return *at; }

static bool __any_sync(u32, bool vote) { return __ballot_sync(~0u, vote) != 0; }
static int __ffs(u32 x) { return __builtin_ffs(x); }

template <int HALF>
static float from_fp16_pair(u32 x) { return from_fp16(HALF ? x >> 16 : x & 0xFFFF); }

static int anew(int x) { return x; }
