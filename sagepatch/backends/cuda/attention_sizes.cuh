// Macros and sizes of an instance of attention.cu: what lies where in shared memory, and how many
// registers hold what. Needs hopper.cuh and wgmma.cuh. attention_tiles.py defines the macros:
//
//   HEAD        columns of Q and K, a multiple of 32        VALUE_DIM   columns of V and out
//   BLOCK_N     keys of a tile                              WARPGROUPS  consumer warpgroups
//   STAGES      tiles in flight                             FLUSH       keys an accumulator T sums
//   PIECES      parts of VALUE that take turns in T         P_LOG2      log2 of the code of p = 1
//   HALF_V      V has 16 bits, else E4M3                    HALF_T      T is FP16, else FP32
//   BF16_V      of the 16 bits: BF16, else FP16             LAG         P may grow to 2^LAG, with IN_PLACE
//   CAP         with LAG and SERIAL: no maximum where scores stay under the first plus this; or 0
//   RAW_V       V comes as the caller gave it
//   ONES        row sums by the tensor core                 POLY        of 8 exp2, on the FMA pipe
//   PINGPONG    warpgroups take turns (two of them)         IN_PLACE    P V adds to the output
//   SERIAL      a warpgroup does one thing at a time        SCALES_AHEAD  with SERIAL: of K, a tile early
//   CAUSAL, WINDOW, KEY_MASK, PACKED                        OUT_HALF    out is FP16, else BF16
//   SPLIT       the last blocks of queries are shared       SHARED_BYTES  of a block, dynamic
//   RAW_Q       Q comes as FP16 (1) or BF16 (2), not as codes of the pre-pass (0)

constexpr int BLOCK_M = 64 * WARPGROUPS;
// Columns of V as the pre-pass pads them, and as all pieces together have them (zeros, not stored).
constexpr int VALUE_PADDED = (VALUE_DIM + 7) / 8 * 8;
constexpr int PIECE_UNIT = PIECES == 1 ? 8 : (HALF_V ? 64 : 8) * PIECES;
constexpr int VALUE = (VALUE_DIM + PIECE_UNIT - 1) / PIECE_UNIT * PIECE_UNIT;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;

// Q and K in shared memory: panels of SWIZZLE bytes a row.
constexpr int SWIZZLE = HEAD <= 32 ? 32 : HEAD <= 64 ? 64 : 128;
constexpr int PANELS = (HEAD + 127) / 128;
constexpr int Q_BYTES = BLOCK_M * SWIZZLE * PANELS;
// With RAW_Q: Q as the caller gave it, rows of HEAD numbers of 16 bits.
constexpr int RAW_Q_BYTES = RAW_Q ? BLOCK_M * HEAD * 2 : 0;
constexpr int K_BYTES = BLOCK_N * SWIZZLE * PANELS;

// E4M3: V^T in panels of V_SWIZZLE keys, VALUE rows and, with ONES, a row of ones and 7 of zeros.
// FP16: V in panels of 64 channels, BLOCK_N rows.
constexpr int ONES_ROWS = ONES ? 8 : 0;
constexpr int V_SWIZZLE = HALF_V ? 128 : BLOCK_N % 128 ? 64 : 128;
constexpr int V_PANELS = HALF_V ? (VALUE + 63) / 64 : BLOCK_N / V_SWIZZLE;
constexpr int V_PANEL_BYTES = (HALF_V ? BLOCK_N : VALUE + ONES_ROWS) * V_SWIZZLE;
constexpr int V_LOADED_BYTES = (HALF_V ? BLOCK_N : VALUE) * V_SWIZZLE * V_PANELS;
constexpr int V_BYTES = (V_PANEL_BYTES * V_PANELS + 1023) / 1024 * 1024;
static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) + RAW_Q_BYTES + 8 * (4 * STAGES + 2) <=
                  SHARED_BYTES,
              "the launcher gives too little shared memory");

constexpr int PIECE = VALUE / PIECES;
constexpr int PV_N = PIECE + ONES_ROWS;  // columns of one P V
constexpr int FLUSHES = BLOCK_N / FLUSH;
constexpr int PV_K = HALF_V ? 16 : 32;
constexpr int SCORES = BLOCK_N / 2;                        // of a thread
constexpr int CODES = HALF_V ? BLOCK_N / 4 : BLOCK_N / 8;  // registers of P
constexpr int KEY_GROUPS = BLOCK_N / 64;
constexpr int T_REGISTERS = PV<PV_N>::REGISTERS;
static_assert(!(ONES && PIECES > 1), "the ones would be summed once a piece");

// Groups of 8 rows follow one another: rows of `bytes` with the summed axis contiguous, or FP16 V.
constexpr uint32_t QK_HIGH = (8 * SWIZZLE >> 4) | swizzle_mode(SWIZZLE);
constexpr uint32_t V_HIGH = (8 * V_SWIZZLE >> 4) | swizzle_mode(V_SWIZZLE);
// FP16 V: distance of two panels of 64 channels; for rows along the summed axis it is not read.
constexpr uint32_t V_LEADING = HALF_V ? (uint32_t)(V_PANEL_BYTES >> 4) << 16 : 1u << 16;

// Element e of a sum in the order of FP32 ones: rows 0 0 1 1 of each 8 columns.
static __device__ __forceinline__ float element(const Accumulator* t, int e) {
#if HALF_T
  return half_at(t[e >> 1], e & 1);
#else
  return t[e];
#endif
}

// Barriers of shared memory, in order: full and empty ones of the stages of K and of V, then of Q.
struct Barriers {
  uint32_t full_k, empty_k, full_v, empty_v, full_q, empty_q;
};

// Makes the barriers, and the rows of ones behind V: by all threads, before anything is copied.
static __device__ __forceinline__ void prepare_shared(const Barriers& b, uint8_t* values) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(b.full_k + 8 * s, 1);
      init_barrier(b.full_v + 8 * s, 1);
      init_barrier(b.empty_k + 8 * s, CONSUMER_WARPS);
      init_barrier(b.empty_v + 8 * s, CONSUMER_WARPS);
    }
    init_barrier(b.full_q, 1);
    init_barrier(b.empty_q, CONSUMER_WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (ONES) {
    constexpr int words = 8 * V_SWIZZLE / 4;
    for (int p = 0; p < STAGES * V_PANELS; p++) {
      uint8_t* panel =
          values + p / V_PANELS * V_BYTES + p % V_PANELS * V_PANEL_BYTES;
      for (int i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t*)(panel + VALUE * V_SWIZZLE))[i] = i < V_SWIZZLE / 4 ? 0x38383838u : 0u;
    }
    share_writes();
  }
}
