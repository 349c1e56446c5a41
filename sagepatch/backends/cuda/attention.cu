// Attention on INT8 Q and K for sm_90a: wgmma, TMA, one producer warp, 64 query rows a consumer
// warpgroup, a persistent grid. The pre-pass (prepass.py) says what the operands are,
// attention_sizes.cuh what the macros of an instance are.
//
// One tile of a warpgroup, in the order of issue: S(i) = Q K(i)^T; T = P(i-1) V(i-1); softmax of
// S(i), which runs beside the second product; O = O alpha(i-1) + T. Scores of a thread: rows
// lane / 4 and 8 under it, keys 8 j + 2 (lane % 4) + {0, 1} of each 8 keys j. With SERIAL a tile is
// finished before the next begins: warpgroups overlap each other only, and S and T share registers.

#include "ptx.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"
#include "attention_sizes.cuh"
#include "attention_work.cuh"
#include "attention_copy.cuh"
#include "attention_products.cuh"
#include "attention_softmax.cuh"
#if RAW_Q
#define VECTORS 1
#include "rows.cuh"
#include "codes.cuh"
#endif
#include "attention_queries.cuh"
#include "attention_output.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const float* q_scale_log2,  // [B, Hq, Sq], or null with RAW_Q
    const float* k_scale,       // [B, Hkv, k_blocks, 4], k_blocks of 64 keys
    const float* k_norm,        // [groups, Hkv], or null: see most_score
    const float* v_scale,       // [groups, Hkv, VALUE_PADDED], or null with RAW_V
    const float* shift_log2,    // [B, Hq, Sq], or null without lse
    const int* cu_q, const int* cu_kv,
    const int* tile_list,       // [B, tiles] and
    const int* tile_counts,     // [B, 2] of key_tiles.cu, with TILE_LIST
    const uint32_t* key_bits,   // [B, key_words]
    uint16_t* out,              // [B, Hq, Sq, VALUE_DIM] by strides of elements
    float* lse,                 // [B, Hq, Sq] or null
    float* parts,               // with SPLIT: [grid, VALUE / 2 + 4, threads that compute]
    int* ready,                 // [grid, WARPGROUPS], zeros
    long long out_stride_b, long long out_stride_h, long long out_stride_s,
    int heads, int q_heads, int group, int q_len, int kv_len, int m_blocks, int whole, int section,
    int causal_offset, int window, int members, int k_blocks, int tiles, int key_words,
    int share_tiles, int share_rest, int share_pieces, uint32_t zero,  // 0, which the compiler must not know
    float q_factor,                                  // RAW_Q: softmax scale times log2(e)
    int* flags) {  // of a guard: [0] goes up where the output is not finite; or null
  extern __shared__ __align__(1024) uint8_t shared[];  // a swizzle repeats every 1024 bytes
  const uint32_t q_at = shared_address(shared);
  const uint32_t k_at = q_at + Q_BYTES;
  const uint32_t v_at = k_at + STAGES * K_BYTES;
  const uint32_t raw_at = v_at + STAGES * V_BYTES;
  const uint32_t barriers = raw_at + RAW_Q_BYTES;
  const uint32_t full_k = barriers, empty_k = full_k + 8 * STAGES, full_v = empty_k + 8 * STAGES,
                 empty_v = full_v + 8 * STAGES, full_q = empty_v + 8 * STAGES, empty_q = full_q + 8;
  const Sizes sizes = {heads,   q_heads,       group,  q_len,   kv_len, m_blocks,    whole,
                       section, causal_offset, window, members, tiles,  share_tiles, share_rest, share_pieces};
  const int turns = whole + (SPLIT ? share_pieces * gridDim.x : 0);

  const Barriers rings = {full_k, empty_k, full_v, empty_v, full_q, empty_q};
  prepare_shared(rings, shared + (v_at - q_at));
  __syncthreads();
  wait_for_front();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0)
      copy_operands(&q_map, &k_map, &v_map, {q_at, k_at, v_at, raw_at}, rings, sizes, turns,
                    cu_q, cu_kv, tile_list, tile_counts);
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS < 3 ? 240 : 160));
  const int consumer = warpgroup - 1;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  const int pair = lane & 3;  // keys and columns 2 pair, 2 pair + 1 of each 8
  const bool speaks = lane == 0;
  if (PINGPONG && consumer == 1) give_turn(1);
  const uint32_t q_low = ((q_at + consumer * 64 * SWIZZLE) >> 4) | 1u << 16;
  const uint32_t k_low = (k_at >> 4) | 1u << 16;
  const uint32_t v_low = (v_at >> 4) | V_LEADING;
  int stage = 0;
  uint32_t phase = 0, q_phase = 0;

  Dealt dealt(sizes);
  for (int t = blockIdx.x; t < turns; t += gridDim.x) {
    const Share share = dealt.take(sizes, t);
    float O[VALUE / 2];
    float m0 = LOWEST, m1 = LOWEST, l0 = 0.0f, l1 = 0.0f;
#pragma unroll
    for (int e = 0; e < VALUE / 2; e++) O[e] = 0.0f;

    Work begun = work_of(share.t, sizes, cu_q, cu_kv, tile_counts);
    restrict_to(begun, share);
    if (begun.count > 0) {
      Work w = begun;
      if constexpr (OWN_TILES) own_tiles(w, sizes, consumer);
      const int row = consumer * 64 + warp * 16 + (lane >> 2);  // and row + 8
      int S[SCORES];
      uint32_t P[CODES];
      Accumulator T[FLUSHES][T_REGISTERS];
#if RAW_Q
      float q0, q1;
      wait(full_q, q_phase);
      q_phase ^= 1;
      quantise_queries(shared + (raw_at - q_at) + consumer * 64 * HEAD * 2,
                       shared + consumer * 64 * SWIZZLE, empty_q, q_factor, consumer, lane, warp,
                       q0, q1);
#else
      const long long q_first = (long long)w.head * q_len + w.q_row;
      const float q0 = q_scale_log2[q_first + min(row, w.q_rows - 1)];
      const float q1 = q_scale_log2[q_first + min(row + 8, w.q_rows - 1)];
#endif
      auto await_queries = [&]() {
        if constexpr (!RAW_Q) {
          wait(full_q, q_phase);
          q_phase ^= 1;
        }
      };
      const float* scales =
          k_scale + ((long long)w.kv_head * k_blocks + w.kv_row / 64) * 4 + pair;
      const int last_block = k_blocks - 1 - w.kv_row / 64;
      const Seen seen = {
          (CAUSAL ? min(w.kv_len, w.first + row + causal_offset + 1) : w.kv_len) - 2 * pair,
          (CAUSAL ? min(w.kv_len, w.first + row + 9 + causal_offset) : w.kv_len) - 2 * pair,
          w.first + row + causal_offset - window + 1 - 2 * pair,
          key_bits + (KEY_MASK ? w.batch * key_words : 0), key_words, 2 * pair};
      float alpha0 = 0.0f, alpha1 = 0.0f;
      float kc[KEY_GROUPS];
      const float* next_scales = scales;  // of the tile behind this one

      auto load_scales = [&](auto masked, int tile) {
        if constexpr (decltype(masked)::value || TILE_LIST) {
#pragma unroll
          for (int g = 0; g < KEY_GROUPS; g++)
            kc[g] = __ldg(scales + min(tile * KEY_GROUPS + g, last_block) * 4);
          next_scales = scales + (tile + 1) * KEY_GROUPS * 4;
        } else {
#pragma unroll
          for (int g = 0; g < KEY_GROUPS; g++) kc[g] = __ldg(next_scales + g * 4);
          next_scales += KEY_GROUPS * 4;
        }
      };
      auto issue_scores = [&]() {
        hold(S);
        mma_fence();
        issue_product(S, q_low, k_low + stage * (K_BYTES >> 4));
      };
      auto hold_sums = [&]() {
        if constexpr (IN_PLACE) hold(O);
        else
#pragma unroll
          for (int f = 0; f < FLUSHES; f++) hold(T[f]);
      };
      // Part `piece` of P V of stage s.
      auto issue_values = [&](int piece, int s) {
        issue_product(O, T, P, v_low + s * (V_BYTES >> 4), piece);
      };
      auto add_sums = [&](int piece) {
        if constexpr (!IN_PLACE) {
#pragma unroll
          for (int f = 0; f < FLUSHES; f++) {
            const float a0 = f ? 1.0f : alpha0, a1 = f ? 1.0f : alpha1;
#pragma unroll
            for (int e = 0; e < PIECE / 2; e++) {
              float& o = O[piece * (PIECE / 2) + e];
              const float add = element(T[f], e);
              o = f ? o + add : __fmaf_rn(o, e & 2 ? a1 : a0, add);
            }
            if constexpr (ONES) {
              l0 = __fmaf_rn(l0, a0, element(T[f], PIECE / 2));
              l1 = __fmaf_rn(l1, a1, element(T[f], PIECE / 2 + 2));
            }
          }
        }
      };
      // The parts of P V behind the one that ran beside the softmax.
      auto other_pieces = [&](int s) {
#pragma unroll
        for (int piece = 1; piece < PIECES; piece++) {
          hold(P);
          hold_sums();
          mma_fence();
          issue_values(piece, s);
          mma_wait<0>();
          hold_sums();
          add_sums(piece);
        }
      };
      auto rescale = [&]() {
        // One branch for the warp: its registers stay uniform.
        if (LAG > 0 && !SERIAL && !__any_sync(~0u, alpha0 != 1.0f || alpha1 != 1.0f)) return;
#pragma unroll
        for (int e = 0; e < VALUE / 2; e++) O[e] *= e & 2 ? alpha1 : alpha0;
      };

      // Tiles that this warpgroup has no use for.
      auto pass = [&](int rest) {
        for (; rest > 0; rest--) {
          wait(full_k + 8 * stage, phase);
          wait(full_v + 8 * stage, phase);
          if (speaks) {
            arrive(empty_k + 8 * stage);
            arrive(empty_v + 8 * stage);
          }
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      };

#if SERIAL
      await_queries();
      if (consumer * 64 >= w.q_rows) {  // no rows
        pass(begun.count);
        w.count = w.low = w.whole = begun.count = 0;
      }
      auto any_step = [&](auto masked, auto capped, int i) {
        constexpr bool CAPPED = decltype(capped)::value;
        const int tile = tile_at(w, i, tile_list, tiles);
        if constexpr (!SCALES_AHEAD) load_scales(masked, tile);
        wait(full_k + 8 * stage, phase);
        issue_scores();
        mma_wait<0>();
        hold(S);
        if (speaks) arrive(empty_k + 8 * stage);
        if constexpr (decltype(masked)::value) hide(S, tile, seen);
        softmax<decltype(masked)::value, CAPPED>(S, kc, q0, q1, m0, m1, l0, l1, alpha0, alpha1,
                                         rescale);
        pack(S, P);
        if constexpr (SCALES_AHEAD)
          load_scales(masked, tile_at(w, min(i + 1, w.count - 1), tile_list, tiles));
        if constexpr (IN_PLACE && !AT_ONCE) rescale();
        wait(full_v + 8 * stage, phase);
        hold(P);
        hold_sums();
        mma_fence();
        issue_values(0, stage);
        mma_wait<0>();
        hold_sums();
        add_sums(0);
        other_pieces(stage);
        if (speaks) arrive(empty_v + 8 * stage);
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
      };
      auto step = [&](auto masked, int i) { any_step(masked, Flag<false>(), i); };
      int i = 0;
      // Without rows there are no tiles left, and a list need not have the entry.
      if constexpr (SCALES_AHEAD)
        load_scales(Flag<true>(),
                    TILE_LIST && w.count == 0 ? 0 : tile_at(w, 0, tile_list, tiles));
      else next_scales += w.bottom * KEY_GROUPS * 4;
#else
      // First tile: nothing to overlap with yet.
      {
        const int tile = tile_at(w, 0, tile_list, tiles);
        load_scales(Flag<true>(), tile);
        await_queries();
        wait(full_k + 8 * stage, phase);
        if constexpr (PINGPONG) take_turn(1 + consumer);
        issue_scores();
        if constexpr (PINGPONG) give_turn(2 - consumer);
        mma_wait<0>();
        hold(S);
        if (speaks) arrive(empty_k + 8 * stage);
        if (w.low > 0 || w.whole == 0) {
          hide(S, tile, seen);
          softmax<true, false>(S, kc, q0, q1, m0, m1, l0, l1, alpha0, alpha1,
                                         rescale);
        } else {
          softmax<false, false>(S, kc, q0, q1, m0, m1, l0, l1, alpha0, alpha1,
                                         rescale);
        }
        pack(S, P);
      }
      float next0 = 0.0f, next1 = 0.0f;  // alpha of the tile whose product is under way

      auto step = [&](auto masked, int i) {
        const int v_stage = stage;
        const uint32_t v_phase = phase;
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
        const int tile = tile_at(w, i, tile_list, tiles);
        load_scales(masked, tile);
        wait(full_k + 8 * stage, phase);
        if constexpr (PINGPONG) take_turn(1 + consumer);
        hold(P);
        hold_sums();
        issue_scores();
        wait(full_v + 8 * v_stage, v_phase);
        mma_fence();
        issue_values(0, v_stage);
        if constexpr (PINGPONG) give_turn(2 - consumer);
        mma_wait<1>();
        hold(S);
        if (speaks) arrive(empty_k + 8 * stage);
        if constexpr (decltype(masked)::value) hide(S, tile, seen);
        softmax<decltype(masked)::value, false>(S, kc, q0, q1, m0, m1, l0, l1, alpha0, alpha1,
                                         rescale);
        // P is an operand until the wait: codes made before it go through an operation that the
        // compiler cannot undo.
        uint32_t codes[CODES];
        pack(S, codes);
        mma_wait<0>();
        hold_sums();
        hold(P);
        if constexpr (IN_PLACE) {
          if (speaks) arrive(empty_v + 8 * v_stage);
          rescale();
        } else {
          const float a0 = alpha0, a1 = alpha1;
          alpha0 = next0;
          alpha1 = next1;
          if (PIECES == 1 && speaks) arrive(empty_v + 8 * v_stage);
          add_sums(0);
          other_pieces(v_stage);
          if (PIECES > 1 && speaks) arrive(empty_v + 8 * v_stage);
          next0 = a0;
          next1 = a1;
        }
#pragma unroll
        for (int e = 0; e < CODES; e++) P[e] = codes[e] | zero;
      };

      int i = 1;
#endif
      if constexpr (WINDOW)
        for (; i < w.low; i++) step(Flag<true>(), i);
#if CAP && SERIAL
      // Scores that cannot pass the maximum of the first tiles by much need none of their own.
      if (i < w.whole) {
        step(Flag<false>(), i++);
        const int key_heads = q_heads / group;
        const int of = w.member * key_heads + w.kv_head - w.batch * key_heads;
        const float most = k_norm ? __ldg(k_norm + of) : __int_as_float(0x7F800000);
        const uint8_t* codes = shared;
        // Both by all threads of a warp, which shuffle: not the second where the first says yes.
        bool under = most_score(codes, row, pair, q0, most) - m0 <= CAP;
        under &= most_score(codes, row + 8, pair, q1, most) - m1 <= CAP;
        if (all_of_us(under, consumer))
          for (; i < w.whole; i++) any_step(Flag<false>(), Flag<true>(), i);
      }
#endif
      for (; i < w.whole; i++) step(Flag<false>(), i);
      for (; i < w.count; i++) step(Flag<true>(), i);
      if (!RAW_Q && speaks) arrive(empty_q);
#if !SERIAL
      wait(full_v + 8 * stage, phase);
      hold(P);
      hold_sums();
      mma_fence();
      issue_values(0, stage);
      mma_wait<0>();
      hold_sums();
      alpha0 = next0;
      alpha1 = next1;
      add_sums(0);
      other_pieces(stage);
      if (speaks) arrive(empty_v + 8 * stage);
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
#endif
      if constexpr (OWN_TILES) pass(begun.count - w.count);

      sum_quad(l0, l1, lane);
    }

    // Worked out again rather than kept in registers through the loop.
    int again = share.t;
    asm volatile("" : "+r"(again));
    const Work w = work_of(again, sizes, cu_q, cu_kv, tile_counts);
    int place = threadIdx.x;
    asm volatile("" : "+r"(place));
    const int row = consumer * 64 + (place & 127) / 32 * 16 + (place & 31) / 4;
    // Whoever has the first tiles of a block comes to them last, and finds there what the others
    // left.
    const int me = consumer * 128 + (place & 127);
    if (SPLIT && share.from > 0) {
      leave_part(O, m0, m1, l0, l1, parts, ready, me);
    } else if (!SPLIT || share.to > 0) {
      if (SPLIT && share.to < ALL) {
        const int end = (share.t - whole + 1) * tiles;
        for (int b = blockIdx.x + 1; Dealt::begin_of(sizes, b) < end; b++)
          take_part(O, m0, m1, l0, l1, parts, ready, me, b);
      }
      const int kv_head = (w.head - w.batch * q_heads) / group;
      const float* channel =
          v_scale + ((long long)w.member * (q_heads / group) + kv_head) * VALUE_PADDED + 2 * pair;
      uint16_t* to = out + w.batch * out_stride_b + (w.head - w.batch * q_heads) * out_stride_h +
                     (long long)(w.q_row + row) * out_stride_s;
      const bool finite =
          store_rows(O, l0, l1, channel, to, out_stride_s, row, w.q_rows, pair);
      if (flags && !finite) atomicMax(flags, 1);
      if (lse && pair == 0)
        store_lse(m0, m1, l0, l1, lse, shift_log2, (long long)w.head * q_len + w.q_row + row, row,
                  w.q_rows);
    }
  }
  if (PINGPONG && consumer == 0) take_turn(1);
}
