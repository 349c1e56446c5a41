// The pre-pass in two launches: `queries` makes the codes of Q, `keys_and_values` takes the
// statistics of K and V head by head and makes their codes while the L2 still has the head.
// prepass.py documents the results.
//
// Bytes of device memory, with n_q, n_k, n_v elements of E bytes: read E (n_q + n_k + n_v), written
// n_q + n_k + n_v (FP16 PV: n_q + n_k + 2 n_v). In bf16 and FP8 PV, at the 4.2 TB/s of an H200:
//   B 1, H 24, S  4608, D 128: 127 MB, floor  30 us
//   B 2, H 30, S 17776, D  64: 614 MB, floor 146 us
// K and V of a head larger than the L2 are read twice.
//
// Macros: Q_TYPE, K_TYPE, V_TYPE (0 fp16, 1 bf16, 2 fp32); HEAD, V_HEAD (head sizes); VECTORS;
// Q_BLOCK (1: one scale a block of 128 queries, 0: one a query); K_GROUPS (keys that share a scale:
// 0 none, 1 all of K_BLOCK, 4 those of a thread of a fragment); K_BLOCK (64 or 128); HALF_PV (P and
// V have 16 bits: FP16, or with BF16_PV that); MASK (0 none, 1 seen bytes, 2 packed); SHIFT (1:
// write shift_log2; Q is then quantised by the second launch, which knows the mean of K). Where the
// attention makes the codes of Q: RAW_Q. Kernels of mma.sync also ask for QK_BITS (4: codes of Q and
// K are INT4, two a byte, the first in the low half), INT8_PV (V in INT8, not E4M3) and SMOOTH_Q
// (the mean of each block of 128 queries is subtracted and written).
#ifndef QK_BITS
#define QK_BITS 8
#endif
#ifndef INT8_PV
#define INT8_PV 0
#endif
#ifndef SMOOTH_Q
#define SMOOTH_Q 0
#endif
#ifndef RAW_Q
#define RAW_Q 0
#endif
#ifndef RAW_V
#define RAW_V 0
#endif
#ifndef BF16_PV
#define BF16_PV 0
#endif
#ifndef K_NORM
#define K_NORM 0
#endif

#include "ptx.cuh"
#include "rows.cuh"
#include "codes.cuh"

// Tokens of a block; keys are padded to whole blocks.
constexpr int ROWS = 128;
// Columns of Q and K: whole products of the tensor core.
constexpr int DP = round_up(HEAD, 256 / QK_BITS);
constexpr int D8 = round_up(V_HEAD, 8);
constexpr int THREADS = HEAD > 128 || V_HEAD > 128 ? 512 : 256;
constexpr int WARPS = THREADS / 32;
// Neighbouring threads that read one token, eight channels each, and tokens read at once.
constexpr int QK_LANES = power_of_two(DP / 8), V_LANES = power_of_two(D8 / 8);
constexpr int QK_ROWS = THREADS / QK_LANES, V_ROWS = THREADS / V_LANES;
constexpr int QK_PASSES = ROWS / QK_ROWS;
constexpr bool WIDE = Q_TYPE == FP32 || K_TYPE == FP32 || V_TYPE == FP32;
// Loads of a thread in flight while it takes statistics, and blocks that a multiprocessor holds.
#ifndef UNROLL
#define UNROLL (WIDE ? 4 : 8)
#endif
#ifndef RESIDENT_THREADS
#define RESIDENT_THREADS (WIDE || !VECTORS || (Q_BLOCK && SHIFT) || SMOOTH_Q ? 512 : 768)
#endif
constexpr int RESIDENT = RESIDENT_THREADS / THREADS;
constexpr bool SEEN = MASK == 1, PACKED = MASK == 2;

// Shared memory of whichever part a block plays: eight channels of every lane, once a warp in fp32
// or once a key in one byte.
constexpr int MOST_LANES = QK_LANES > V_LANES ? QK_LANES : V_LANES;
__shared__ uint4 room[MOST_LANES * 8 * (WARPS * 4 > ROWS ? WARPS * 4 : ROWS) / 16];

// What both kernels are told. Statistics of a head are taken in `chunks` parts of whole blocks. Of
// a row, `chunk_units` and `block_units` are the blocks of threads for its statistics and its codes,
// `row_units` both.
struct Sizes {
  int members, group, q_len, kv_len, kv_pad, rows, ahead;
  Divisor q_heads, heads, chunks, q_blocks, chunk_units, block_units, row_units;
};

struct Mask {
  const u8* seen;
  i64 batch, token;
  const int* q_offsets;
  const int* kv_offsets;
};

__device__ __forceinline__ int blocks_of(int tokens) { return (tokens + ROWS - 1) / ROWS; }

// The first block of a chunk: chunks differ by one block at most.
__device__ __forceinline__ int chunk_start(int chunk, int blocks, const Sizes& n) {
  return divide(chunk * blocks, n.chunks).quotient;
}

// Where the keys of block number `block` of a head come from. In a packed call `batch` is 0 and
// `group` the member.
struct Keys {
  int batch, group, start, first, length;

  __device__ __forceinline__ Keys(const Mask& mask, const Sizes& n, int item, int block) {
    if constexpr (PACKED) {
      batch = 0;
      group = member_of(mask.kv_offsets, n.members, block, ROWS);
      const Span span = span_of(mask.kv_offsets, group, n.kv_len);
      start = span.start;
      length = span.length;
      first = (block - first_block(mask.kv_offsets, group, ROWS)) * ROWS;
    } else {
      batch = group = item;
      start = 0;
      length = n.kv_len;
      first = block * ROWS;
    }
  }

  // Whether row `row` of the block is a key that somebody sees.
  __device__ __forceinline__ bool has(const Mask& mask, int row) const {
    if constexpr (PACKED) return (u32)(first + row) < (u32)length;
    if (row >= length - first) return false;
    if constexpr (SEEN)
      return mask.seen[batch * mask.batch + (i64)(first + row) * mask.token] != 0;
    return true;
  }
};

#include "statistics.cuh"

#include "quantise.cuh"

// Codes of Q, and zeros for all that counts: `progress` and what lies behind it.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    queries(const void* q, const Strides q_strides, const Mask mask, const Sizes n,
            const QOut q_out, int* progress, int progress_ints) {
  let_next_begin();
  const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x;
  for (i64 i = thread; i < progress_ints; i += (i64)gridDim.x * THREADS) progress[i] = 0;
  if constexpr (!SHIFT && !RAW_Q)
    quantise_q(q, q_strides, mask, n, q_out, blockIdx.x, Statistics{});
}

// Statistics of K and V, and their codes. Rows are heads (of a batch member, unless packed). The
// statistics run `ahead` rows before the codes: far enough to be ready, near enough for the L2 to
// have the keys still.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    keys_and_values(const void* q, const void* k, const void* v, const Strides q_strides,
                    const Strides k_strides, const Strides v_strides, const Mask mask,
                    const Sizes n, const QOut q_out, const KOut k_out, void* v_codes,
                    const Statistics statistics) {
  let_next_begin();
  const int lead = n.ahead * n.chunk_units.by;
  const int mixed = (n.rows - n.ahead) * n.row_units.by;
  int index = blockIdx.x;
  bool reduces = false;
  Divided at;  // row, unit
  if (index < lead) {
    at = divide(index, n.chunk_units);
    reduces = true;
  } else if ((index -= lead) < mixed) {
    at = divide(index, n.row_units);
    reduces = at.rest < n.chunk_units.by;
    if (reduces)
      at.quotient += n.ahead;
    else
      at.rest -= n.chunk_units.by;
  } else {
    index -= mixed;
    at = divide(index, n.block_units);
    at.quotient += n.rows - n.ahead;
    if (SHIFT && at.quotient >= n.rows) {
      quantise_q(q, q_strides, mask, n, q_out, index - n.ahead * n.block_units.by, statistics);
      return;
    }
  }
  const bool values = !RAW_V && at.rest % 2;
  const int unit = RAW_V ? at.rest : at.rest / 2;
  const auto [batch, head] = divide(at.quotient, n.heads);  // packed: batch 0
  if (reduces) {
    const auto [member, chunk] = divide(unit, n.chunks);
    const int group = PACKED ? member : batch;
    if (values)
      reduce_chunk<V_TYPE, V_LANES, V_HEAD, false>(v, v_strides, mask, n, statistics, group, head,
                                                   chunk);
    else
      reduce_chunk<K_TYPE, QK_LANES, HEAD, true>(k, k_strides, mask, n, statistics, group, head,
                                                 chunk);
  } else if (values) {
    quantise_v(v, v_strides, mask, n, v_codes, batch, head, unit, statistics);
  } else {
    quantise_k(k, k_strides, mask, n, k_out, batch, head, unit, statistics);
  }
}
