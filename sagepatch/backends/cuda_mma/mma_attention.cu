// Attention on INT8 or INT4 Q and K by mma.sync, for sm_80 to sm_121: one block of threads for
// BLOCK_M queries of a head, K and V through cp.async, two tiles of keys in flight. The pre-pass
// (prepass.py) says what the operands are; tiles.py defines the macros below.
//
//   HEAD        columns of Q and K                          VALUE_DIM  columns of V and out
//   BLOCK_N     keys of a tile, 64 or 128                   WARPS, M_TILES  of 16 rows a warp
//   QK_BITS     8 or 4                                      K_SCALES   0 one a key, 1 of a thread
//   PV          codes: 0 E4M3, 1 FP16, 2 INT8               SUM        0 FP32, 1 FP16, 2 INT32
//   FLUSH       keys that a sum takes before it is added to FP32
//   IN_PLACE    P V adds to the output itself               P_LOG2     log2 of the code of p = 1
//   SMOOTH_Q    scores of the mean of a block of queries are added
//   MASK        0 none, 1 bits of keys, 2 bool, 3 additive  MASK_TYPE  0 fp16, 1 bf16, 2 fp32
//   SOFTCAP     scores go through cap * tanh(score / cap)
//   V_STAGES    tiles of V in flight; RESIDENT blocks of threads a multiprocessor
//   Q_REGISTERS Q stays in registers                        SHARED_BYTES  of a block, dynamic
//
// Scores of a thread, lane 4 g + t: rows g and g + 8 of each tile of 16, keys 8 j + 2 t + {0, 1} of
// each 8 keys j, that is one of the four groups that share a scale of K in 64 keys.

#include "mma.cuh"
#include "mma_sizes.cuh"
#include "mma_work.cuh"
#include "mma_softmax.cuh"
#include "mma_values.cuh"
#include "mma_output.cuh"

// Shapes: q8 [B, Hq, Sq, ROW_BYTES]; k8 [B, Hkv, kv_pad, ROW_BYTES]; v8 [B, Hkv, VALUE, kv_pad] or
// FP16 [B, Hkv, kv_pad, VALUE]; q_scale_log2, shift_log2 [B, Hq, Sq]; k_scale [B, Hkv, kv_pad] or
// [B, Hkv, kv_pad / 64, 4]; v_scale [members, Hkv, VALUE]; mean_scores_log2 [B, Hq, m_blocks,
// kv_pad]; sinks [Hq]; key_bits [B, kv_pad / 32]; states [entries, tiles]; lse [B, Hq, Sq] or null.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) mma_attention(
    const u8* q8, const u8* k8, const u8* v8, const float* q_scale_log2, const float* k_scale,
    const float* v_scale, const float* shift_log2, const float* mean_scores_log2,
    const float* sinks, const int* cu_q, const int* cu_kv, const u32* key_bits, const u8* states,
    const Mask mask, void* out, float* lse, i64 out_batch, i64 out_head, i64 out_row,
    const Sizes sizes) {
  const Work w = work_of(blockIdx.x, sizes, cu_q, cu_kv);
  if (w.rows == 0) return;
  u8* const shared = dynamic_shared();
  const u32 q_at = shared_address(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const States tiles(w, sizes, key_bits, states);

  // Rows of keys of all heads, those of this one first, and of means; they fit in 31 bits.
  const int k_first = w.kv_head * sizes.kv_pad + w.kv_row;
  const int means_row = w.head * sizes.m_blocks + w.block;
  const auto copy_keys = [&](int tile, int slot) {
    const u32 to = q_at + Q_BYTES + slot * K_BYTES;
    const i64 row = anew(k_first) + tile * BLOCK_N;
    copy_rows<BLOCK_N, ROW_BYTES, false>(to, k8 + row * ROW_BYTES, ROW_BYTES, 0);
    if constexpr (BY_TOKEN) copy_numbers(to + SCALES_AT, k_scale + row);
    if constexpr (SMOOTH_Q)
      copy_numbers(to + MEANS_AT, mean_scores_log2 + (i64)anew(means_row) * sizes.kv_pad +
                                      w.kv_row + tile * BLOCK_N);
  };
  const auto copy_values = [&](int tile, int slot) {
    const u32 to = q_at + Q_BYTES + 2 * K_BYTES + slot * V_BYTES;
    if constexpr (PV == PV_FP16) {
      const i64 row = anew(k_first) + tile * BLOCK_N;
      copy_rows<V_ROWS, V_ROW_BYTES, false>(to, v8 + row * V_ROW_BYTES, V_ROW_BYTES, 0);
    } else {
      const i64 row = anew(w.kv_head) * VALUE;
      copy_rows<V_ROWS, V_ROW_BYTES, false>(
          to, v8 + row * sizes.kv_pad + w.kv_row + tile * BLOCK_N, sizes.kv_pad, 0);
    }
  };

  int tile = tiles.next(w.bottom, w.top), slot = 0;
  copy_rows<BLOCK_M, ROW_BYTES, true>(q_at, q8 + w.q_row * ROW_BYTES, ROW_BYTES, w.rows);
  if (tile < w.top) {
    copy_keys(tile, 0);
    if constexpr (V_STAGES == 2) copy_values(tile, 0);
  }
  commit_copies();

  // Rows g and g + 8 of the warp's tiles of 16.
  Rows rows[M_TILES];
  const auto row_of = [&](int mt, int i) { return warp * WARP_ROWS + mt * 16 + i * 8 + g; };
  // Rows behind the last are computed as it and not stored.
  const auto real_row = [&](const Work& of, int mt, int i) {
    return min(row_of(mt, i), of.rows - 1);
  };
  float O[M_TILES][V_TILES][4];
#pragma unroll
  for (int mt = 0; mt < M_TILES; mt++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rows[mt].q[i] = __ldg(q_scale_log2 + w.q_row + real_row(w, mt, i));
      rows[mt].m[i] = FLOAT_SCORES ? -infinity() : LOWEST;
      rows[mt].l[i] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < V_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) O[mt][n][e] = 0.f;
  }

  u32 q[M_TILES][Q_REGISTERS ? QK_STEPS : 1][4];
  const auto load_queries = [&](int mt, int k, int thread) {
    const int row = thread / 32 * WARP_ROWS + mt * 16 + (thread & 15);
    const u32 at = q_at + place<ROW_BYTES>(row, 2 * k + (thread / 16 & 1));
    load_matrices(q[mt][Q_REGISTERS ? k : 0], at);
  };
  bool begun = false;

  while (tile < w.top) {
    const int next = tiles.next(tile + 1, w.top);
    const u32 k_at = q_at + Q_BYTES + slot * K_BYTES;
    const int v_slot = V_STAGES == 2 ? slot : 0;
    wait_for_copies<0>();
    __syncthreads();  // the tile is there, and everybody is done with the one before
    if constexpr (V_STAGES == 1) {
      copy_values(tile, 0);
      commit_copies();
    }
    if (next < w.top) {
      copy_keys(next, slot ^ 1);
      if constexpr (V_STAGES == 2) copy_values(next, slot ^ 1);
    }
    commit_copies();
    if (Q_REGISTERS && !begun) {
#pragma unroll
      for (int mt = 0; mt < M_TILES; mt++)
#pragma unroll
        for (int k = 0; k < QK_STEPS; k++) load_queries(mt, k, threadIdx.x);
      begun = true;
    }

    float kc[KEY_GROUPS];
#pragma unroll
    for (int i = 0; i < KEY_GROUPS; i++)
      kc[i] = BY_TOKEN ? 0.f
                       : __ldg(k_scale + ((k_first / 64 + tile * KEY_GROUPS + i) * 4 + t));
    const int magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
    int S[M_TILES][N_TILES][4];
    // Places of rows cost less to work out than registers to keep them in.
    const int me = anew(threadIdx.x);
#pragma unroll
    for (int k = 0; k < QK_STEPS; k++) {
      if constexpr (!Q_REGISTERS)
#pragma unroll
        for (int mt = 0; mt < M_TILES; mt++) load_queries(mt, k, me);
#pragma unroll
      for (int j = 0; j < N_TILES; j += 2) {
        u32 b[4];  // both registers of n-tiles j and j + 1
        const int row = j * 8 + (me & 7) + (me / 16 & 1) * 8;
        load_matrices(b, k_at + place<ROW_BYTES>(row, 2 * k + (me / 8 & 1)));
#pragma unroll
        for (int mt = 0; mt < M_TILES; mt++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int(&s)[4] = S[mt][j + i];
            const u32(&a)[4] = q[mt][Q_REGISTERS ? k : 0];
            if (k == 0)
              mma_scores<QK_BITS>(s, a, b[2 * i], b[2 * i + 1], magic);
            else
              mma_scores<QK_BITS>(s, a, b[2 * i], b[2 * i + 1], s);
          }
      }
    }

    bool partial = tile < w.low || tile >= w.high;
    if constexpr (HAS_STATES) partial = partial || tiles.of(tile) != WHOLE;
    const int key = tile * BLOCK_N;
    Terms terms;
    terms.scales = (const float*)(shared + Q_BYTES + slot * K_BYTES + SCALES_AT) + 2 * t;
    terms.means = (const float*)(shared + Q_BYTES + slot * K_BYTES + MEANS_AT) + 2 * t;
    terms.cap = sizes.cap_log2;
    u32 P[M_TILES][CODES];
#pragma unroll
    for (int mt = 0; mt < M_TILES; mt++) {
      i64 mask_rows[2] = {0, 0};
      if constexpr (FULL_MASK)
#pragma unroll
        for (int i = 0; i < 2; i++)
          mask_rows[i] = w.batch * mask.batch + w.q_head * mask.head +
                         (w.first + real_row(w, mt, i)) * mask.row + (key + 2 * t) * mask.key;
      if constexpr (SOFTCAP)
#pragma unroll
        for (int i = 0; i < 2; i++)
          terms.shift[i] = __ldg(shift_log2 + w.q_row + real_row(w, mt, i));
      if (partial) {
        // Few tiles are partial: what only they need takes no registers from the others.
        const Work p = work_of(anew(blockIdx.x), sizes, cu_q, cu_kv);
        Seen seen;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int end = p.first + row_of(mt, i) + sizes.causal_offset + 1;
          seen.end[i] = min(p.kv_len, end) - 2 * t;
          seen.begin[i] = end - sizes.window - 2 * t;
        }
        u32 bits[BLOCK_N / 32];
        if constexpr (PLACES)
#pragma unroll
          for (int i = 0; i < BLOCK_N / 32; i++)
            bits[i] = __ldg(tiles.bits + tile * (BLOCK_N / 32) + i) >> (2 * t);
        hide(S[mt], seen, key, bits, mask, mask_rows);
        if constexpr (FLOAT_SCORES)
          softmax_of_floats<true>(S[mt], kc, rows[mt], terms, mask, mask_rows);
        else
          softmax_of_integers<true>(S[mt], kc, rows[mt]);
      } else {
        if constexpr (FLOAT_SCORES)
          softmax_of_floats<false>(S[mt], kc, rows[mt], terms, mask, mask_rows);
        else
          softmax_of_integers<false>(S[mt], kc, rows[mt]);
      }
      pack(S[mt], P[mt]);
    }

    if constexpr (V_STAGES == 1) {
      wait_for_copies<1>();
      __syncthreads();  // V(tile) is there
    }
    add_values(O, P, rows, q_at + Q_BYTES + 2 * K_BYTES + v_slot * V_BYTES);
    tile = next;
    slot ^= 1;
  }
  wait_for_copies<0>();

  // Places in the output are worked out only now.
  const Work o = work_of(anew(blockIdx.x), sizes, cu_q, cu_kv);
  const float* const v_scales =
      v_scale + ((i64)o.member * (sizes.q_heads / sizes.group) + o.q_head / sizes.group) * VALUE;
#pragma unroll
  for (int mt = 0; mt < M_TILES; mt++) {
    Ended ended[2];
    i64 at[2];
    bool stored[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float l = rows[mt].l[i];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      const i64 row = o.q_row + real_row(o, mt, i);
      const float shift = shift_log2 ? __ldg(shift_log2 + row) : 0.f;
      const float sink = sinks ? __ldg(sinks + o.q_head) * LOG2E : -infinity();
      ended[i] = end_row(rows[mt].m[i], l, shift, sink);
      stored[i] = row_of(mt, i) < o.rows;
      at[i] = o.batch * out_batch + o.q_head * out_head +
              (row - (i64)o.head * sizes.q_len) * out_row;
      if (lse && stored[i] && t == 0)
        lse[row] = l == 0.f && !sinks ? -infinity() : ended[i].lse * LN2;
    }
    store_rows(O[mt], ended, v_scales, out, sizes.out_type, at, stored);
  }
}
