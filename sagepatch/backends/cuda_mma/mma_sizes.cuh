// Sizes of an instance of mma_attention.cu, from its macros: what lies where in shared memory, and
// how many registers hold what. Needs mma.cuh.

// What the second product multiplies, and what it sums in.
constexpr int PV_E4M3 = 0, PV_FP16 = 1, PV_INT8 = 2;
constexpr bool HALF_SUM = SUM == 1;
constexpr bool PLACES = MASK == 1, ADDITIVE = MASK == 3, FULL_MASK = MASK >= 2;
// A mask leaves some tiles of keys dead, some whole.
constexpr bool HAS_STATES = MASK != 0;
// Scores that need more than one multiplication are made in fp32 before their maximum is taken.
constexpr bool BY_TOKEN = K_SCALES == 0;
constexpr bool FLOAT_SCORES = BY_TOKEN || SMOOTH_Q || SOFTCAP || ADDITIVE;

constexpr int WARP_ROWS = 16 * M_TILES;
constexpr int BLOCK_M = WARPS * WARP_ROWS;
constexpr int THREADS = WARPS * 32;

constexpr int round_to(int n, int to) { return (n + to - 1) / to * to; }

// Q and K: rows of ROW_BYTES, a product takes 32 of them.
constexpr int ROW_BYTES = HEAD * QK_BITS / 8;
constexpr int QK_STEPS = ROW_BYTES / 32;
constexpr int N_TILES = BLOCK_N / 8;
constexpr int KEY_GROUPS = BLOCK_N / 64;

// V: 8-bit codes lie transposed, a row of keys for each channel; FP16 as it came, a row of channels
// for each key.
constexpr int VALUE = round_to(VALUE_DIM, 8);
constexpr int V_TILES = VALUE / 8;
constexpr int V_ROW_BYTES = PV == PV_FP16 ? VALUE * 2 : BLOCK_N;
constexpr int V_ROWS = PV == PV_FP16 ? BLOCK_N : VALUE;
constexpr int PV_KEYS = PV == PV_FP16 ? 16 : 32;  // of a product
constexpr int CODES = BLOCK_N / PV_KEYS * 4;      // registers of P, a tile of rows
constexpr int FLUSHES = BLOCK_N / FLUSH;
constexpr int FLUSH_STEPS = FLUSH / PV_KEYS;

constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;
constexpr int K_TILE_BYTES = BLOCK_N * ROW_BYTES;
// Behind the codes of K lie what is one number a key: scales, and scores of the mean of Q.
constexpr int SCALES_AT = K_TILE_BYTES;
constexpr int MEANS_AT = SCALES_AT + (BY_TOKEN ? BLOCK_N * 4 : 0);
constexpr int K_BYTES = MEANS_AT + (SMOOTH_Q ? BLOCK_N * 4 : 0);
constexpr int V_BYTES = V_ROWS * V_ROW_BYTES;
static_assert(Q_BYTES + 2 * K_BYTES + V_STAGES * V_BYTES == SHARED_BYTES,
              "the launcher gives another amount of shared memory");
static_assert(BLOCK_N % 64 == 0 && BLOCK_N % FLUSH == 0 && HEAD % (256 / QK_BITS) == 0, "");

// A row of `bytes` bytes begins `bytes` behind the one before; of the chunks of 16 bytes in it,
// chunk c lies at c ^ spread(row), so that 8 rows of a matrix meet all banks once.
template <int BYTES>
__device__ __forceinline__ constexpr int spread(int row) {
  constexpr int chunks = BYTES / 16;
  constexpr int together = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
  return row * together / 8 & (together - 1);
}

template <int BYTES>
__device__ __forceinline__ u32 place(int row, int chunk) {
  return row * BYTES + ((chunk ^ spread<BYTES>(row)) << 4);
}

// Rows of BYTES, the first at `from`, others `step` bytes behind one another; those from `rows` on
// are zeros.
template <int ROWS, int BYTES, bool CUT>
__device__ __forceinline__ void copy_rows(u32 to, const u8* from, i64 step, int rows) {
  constexpr int chunks = BYTES / 16, all = ROWS * chunks;
  // Where all threads together take whole rows, 8 or more, a thread's places differ by constants.
  constexpr int together = THREADS % chunks == 0 ? THREADS / chunks : 1;
  if constexpr (together % 8 == 0) {
    const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    to += place<BYTES>(row, chunk);
    from += row * step + chunk * 16;
#pragma unroll
    for (int first = 0; first < ROWS; first += together)
      if (first + together <= ROWS || first + row < ROWS) {
        const bool there = !CUT || first + row < rows;
        copy16(to + first * BYTES, from + (there ? first * step : -row * step), there);
      }
  } else {
#pragma unroll
    for (int first = 0; first < all; first += THREADS) {
      const int i = first + threadIdx.x;
      const int row = i / chunks, chunk = i - row * chunks;
      if (all % THREADS == 0 || i < all) {
        const bool there = !CUT || row < rows;
        copy16(to + place<BYTES>(row, chunk), from + (there ? row : 0) * step + chunk * 16, there);
      }
    }
  }
}

// One number a key of a tile.
__device__ __forceinline__ void copy_numbers(u32 to, const float* from) {
  if (threadIdx.x < BLOCK_N / 4) copy16(to + threadIdx.x * 16, from + threadIdx.x * 4);
}
