// Attention on INT8 Q and K for sm_90a: wgmma, TMA, one producer warp, 64 query rows a consumer
// warpgroup, a persistent grid. The pre-pass (prepass.py) says what the operands are; attention.py
// defines the macros below.
//
//   HEAD        columns of Q and K, a multiple of 32        VALUE_DIM   columns of V and out
//   BLOCK_N     keys of a tile                              WARPGROUPS  consumer warpgroups
//   STAGES      tiles in flight                             FLUSH       keys an accumulator T sums
//   PIECES      parts of VALUE that take turns in T         P_LOG2      log2 of the code of p = 1
//   HALF_V      V is FP16, else E4M3                        HALF_T      T is FP16, else FP32
//   ONES        row sums by the tensor core                 POLY        of 8 exp2, on the FMA pipe
//   PINGPONG    warpgroups take turns (two of them)         IN_PLACE    P V adds to the output itself
//   LATE_PACK   codes of P are made behind P V              PINNED      the softmax ends before it does
//   CAUSAL, WINDOW, KEY_MASK, PACKED                        OUT_HALF    out is FP16, else BF16
//   SPLIT       the last blocks of queries are shared       SHARED_BYTES  of a block, dynamic
//
// One tile of a warpgroup, in the order of issue: S(i) = Q K(i)^T; T = P(i-1) V(i-1); softmax of
// S(i), which runs beside the second product; O = O alpha(i-1) + T. Scores of a thread: rows
// lane / 4 and 8 under it, keys 8 j + 2 (lane % 4) + {0, 1} of each 8 keys j.

#include "hopper.cuh"
#include "wgmma.cuh"
#include "attention_work.cuh"

constexpr int VALUE = (VALUE_DIM + 7) / 8 * 8;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int CONSUMER_WARPS = 4 * WARPGROUPS;

// Q and K in shared memory: panels of SWIZZLE bytes a row.
constexpr int SWIZZLE = HEAD <= 32 ? 32 : HEAD <= 64 ? 64 : 128;
constexpr int PANELS = (HEAD + 127) / 128;
constexpr int Q_BYTES = BLOCK_M * SWIZZLE * PANELS;
constexpr int K_BYTES = BLOCK_N * SWIZZLE * PANELS;

// E4M3: V^T in panels of V_SWIZZLE keys, VALUE rows and, with ONES, a row of ones and 7 of zeros.
// FP16: V in panels of 64 channels, BLOCK_N rows.
constexpr int ONES_ROWS = ONES ? 8 : 0;
constexpr int V_SWIZZLE = HALF_V ? 128 : BLOCK_N % 128 ? 64 : 128;
constexpr int V_PANELS = HALF_V ? (VALUE + 63) / 64 : BLOCK_N / V_SWIZZLE;
constexpr int V_PANEL_BYTES = (HALF_V ? BLOCK_N : VALUE + ONES_ROWS) * V_SWIZZLE;
constexpr int V_LOADED_BYTES = (HALF_V ? BLOCK_N : VALUE) * V_SWIZZLE * V_PANELS;
constexpr int V_BYTES = (V_PANEL_BYTES * V_PANELS + 1023) / 1024 * 1024;
static_assert(Q_BYTES + STAGES * (K_BYTES + V_BYTES) + 8 * (4 * STAGES + 2) <= SHARED_BYTES,
              "the launcher gives too little shared memory");

constexpr int PIECE = VALUE / PIECES;
constexpr int PV_N = PIECE + ONES_ROWS;  // columns of one P V
constexpr int FLUSHES = BLOCK_N / FLUSH;
constexpr int PV_K = HALF_V ? 16 : 32;
constexpr int SCORES = BLOCK_N / 2;                    // of a thread
constexpr int CODES = HALF_V ? BLOCK_N / 4 : BLOCK_N / 8;  // registers of P
constexpr int KEY_GROUPS = BLOCK_N / 64;
constexpr int T_REGISTERS = PV<PV_N>::REGISTERS;
static_assert(!(ONES && PIECES > 1), "the ones would be summed once a piece");

constexpr int HIDDEN = -2147483647 - 1;  // a score that no product reaches
constexpr float LOWEST = -3.0e38f;       // maximum of no score
constexpr float LN2 = 0.6931471805599453f;

// Groups of 8 rows follow one another: rows of `bytes` with the summed axis contiguous, or FP16 V.
constexpr uint32_t QK_HIGH = (8 * SWIZZLE >> 4) | swizzle_mode(SWIZZLE);
constexpr uint32_t V_HIGH = (8 * V_SWIZZLE >> 4) | swizzle_mode(V_SWIZZLE);
// FP16 V: distance of two panels of 64 channels; for rows along the summed axis it is not read.
constexpr uint32_t V_LEADING = HALF_V ? (uint32_t)(V_PANEL_BYTES >> 4) << 16 : 1u << 16;

// Element e of a sum in the order of FP32 ones: rows 0 0 1 1 of each 8 columns.
static __device__ __forceinline__ float element(const Sum* t, int e) {
#if HALF_T
  return half_at(t[e >> 1], e & 1);
#else
  return t[e];
#endif
}

// ---- the kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const float* q_scale_log2,  // [B, Hq, Sq]
    const float* k_scale,       // [B, Hkv, k_blocks, 4], k_blocks of 64 keys
    const float* v_scale,       // [groups, Hkv, VALUE]
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
    int causal_offset, int window, int members, int k_blocks, int tiles, int key_words, int share_tiles,
    int share_rest, uint32_t zero) {  // 0, which the compiler must not know
  extern __shared__ __align__(1024) uint8_t shared[];  // a swizzle repeats every 1024 bytes
  const uint32_t q_at = shared_address(shared);
  const uint32_t k_at = q_at + Q_BYTES;
  const uint32_t v_at = k_at + STAGES * K_BYTES;
  const uint32_t barriers = v_at + STAGES * V_BYTES;
  const uint32_t full_k = barriers, empty_k = full_k + 8 * STAGES, full_v = empty_k + 8 * STAGES,
                 empty_v = full_v + 8 * STAGES, full_q = empty_v + 8 * STAGES, empty_q = full_q + 8;
  const Sizes sizes = {heads,         q_heads, group,   q_len, kv_len,      m_blocks,  whole, section,
                       causal_offset, window,  members, tiles, share_tiles, share_rest};

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(full_k + 8 * s, 1);
      init_barrier(full_v + 8 * s, 1);
      init_barrier(empty_k + 8 * s, CONSUMER_WARPS);
      init_barrier(empty_v + 8 * s, CONSUMER_WARPS);
    }
    init_barrier(full_q, 1);
    init_barrier(empty_q, CONSUMER_WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if constexpr (ONES) {
    constexpr int words = 8 * V_SWIZZLE / 4;
    for (int p = 0; p < STAGES * V_PANELS; p++) {
      uint8_t* panel = shared + (v_at - q_at) + p / V_PANELS * V_BYTES + p % V_PANELS * V_PANEL_BYTES;
      for (int i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t*)(panel + VALUE * V_SWIZZLE))[i] = i < V_SWIZZLE / 4 ? 0x38383838u : 0u;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) {
      int stage = 0;
      uint32_t phase = 0, q_phase = 0;
      Share share;
      for (Shares shares(sizes); shares.take(sizes, share);) {
        Work w = work_of(share.t, sizes, cu_q, cu_kv, tile_counts);
        restrict_to(w, share);
        if (w.count == 0) continue;
        wait(empty_q, q_phase ^ 1);
        q_phase ^= 1;
        expect_bytes(full_q, Q_BYTES);
        for (int p = 0; p < PANELS; p++)
          load_box(q_at + p * BLOCK_M * SWIZZLE, &q_map, full_q, p * 128, w.q_row, w.head);
        for (int i = 0; i < w.count; i++) {
          int tile = tile_at(w, i, tile_list, tiles);
          int key = w.kv_row + tile * BLOCK_N;
          wait(empty_k + 8 * stage, phase ^ 1);
          expect_bytes(full_k + 8 * stage, K_BYTES);
          for (int p = 0; p < PANELS; p++)
            load_box(k_at + stage * K_BYTES + p * BLOCK_N * SWIZZLE, &k_map, full_k + 8 * stage,
                     p * 128, key, w.kv_head);
          wait(empty_v + 8 * stage, phase ^ 1);
          expect_bytes(full_v + 8 * stage, V_LOADED_BYTES);
          for (int p = 0; p < V_PANELS; p++) {
            uint32_t to = v_at + stage * V_BYTES + p * V_PANEL_BYTES;
            if (HALF_V) load_box(to, &v_map, full_v + 8 * stage, p * 64, key, w.kv_head);
            else load_box(to, &v_map, full_v + 8 * stage, key + p * V_SWIZZLE, 0, w.kv_head);
          }
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    }
    return;
  }

  if constexpr (WARPGROUPS == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  if constexpr (WARPGROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  if constexpr (WARPGROUPS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  const int consumer = warpgroup - 1;
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  const int pair = lane & 3;  // keys and columns 2 pair, 2 pair + 1 of each 8
  const bool speaks = lane == 0;
  if constexpr (PINGPONG) {
    if (consumer == 1) give_turn(1);
  }
  const uint32_t q_low = ((q_at + consumer * 64 * SWIZZLE) >> 4) | 1u << 16;
  const uint32_t k_low = (k_at >> 4) | 1u << 16;
  const uint32_t v_low = (v_at >> 4) | V_LEADING;
  int stage = 0;
  uint32_t phase = 0, q_phase = 0;

  Share share;
  for (Shares shares(sizes); shares.take(sizes, share);) {
    float O[VALUE / 2];
    float m0 = LOWEST, m1 = LOWEST, l0 = 0.0f, l1 = 0.0f;
#pragma unroll
    for (int e = 0; e < VALUE / 2; e++) O[e] = 0.0f;

    Work begun = work_of(share.t, sizes, cu_q, cu_kv, tile_counts);
    restrict_to(begun, share);
    if (begun.count > 0) {
      const Work w = begun;
      const int row = consumer * 64 + warp * 16 + (lane >> 2);  // and row + 8
      int S[SCORES];
      uint32_t P[CODES];
      Sum T[FLUSHES][T_REGISTERS];
      const long long q_first = (long long)w.head * q_len + w.q_row;
      const float q0 = q_scale_log2[q_first + min(row, w.q_rows - 1)];
      const float q1 = q_scale_log2[q_first + min(row + 8, w.q_rows - 1)];
      const float* scales =
          k_scale + ((long long)w.kv_head * k_blocks + w.kv_row / 64) * 4 + pair;
      const int last_block = k_blocks - 1 - w.kv_row / 64;
      // Keys seen by my two rows end before `end` and start at `begin`, less my first key.
      const int end0 = (CAUSAL ? min(w.kv_len, w.first + row + causal_offset + 1) : w.kv_len) - 2 * pair;
      const int end1 = (CAUSAL ? min(w.kv_len, w.first + row + 9 + causal_offset) : w.kv_len) - 2 * pair;
      const int begin0 = w.first + row + causal_offset - window + 1 - 2 * pair;
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
#pragma unroll
        for (int k = 0; k < HEAD / 32; k++) {
          const uint32_t in_panel = k % 4 * 2;
          mma_qk(S, descriptor(q_low + k / 4 * (BLOCK_M * SWIZZLE >> 4) + in_panel, QK_HIGH),
                 descriptor(k_low + stage * (K_BYTES >> 4) + k / 4 * (BLOCK_N * SWIZZLE >> 4) + in_panel,
                            QK_HIGH),
                 k != 0);
        }
        mma_commit();
      };
      auto hold_sums = [&]() {
        if constexpr (IN_PLACE) hold(O);
        else
#pragma unroll
          for (int f = 0; f < FLUSHES; f++) hold(T[f]);
      };
      // Part `piece` of P V of the tile in V's stage s.
      auto issue_values = [&](int piece, int s) {
#pragma unroll
        for (int f = 0; f < FLUSHES; f++)
#pragma unroll
          for (int k = 0; k < FLUSH / PV_K; k++) {
            const int step = f * (FLUSH / PV_K) + k;
            uint32_t low = v_low + s * (V_BYTES >> 4);
            if constexpr (HALF_V) {
              low += step * (16 * 128 >> 4) + piece * PIECE / 64 * (V_PANEL_BYTES >> 4);
            } else {
              constexpr int steps = V_SWIZZLE / 32;  // of a panel
              low += step / steps * (V_PANEL_BYTES >> 4) + step % steps * 2 +
                     piece * (PIECE * V_SWIZZLE >> 4);
            }
#if IN_PLACE
            PV<PV_N>::mma(O, P + step * 4, descriptor(low, V_HIGH), 1);
#else
            PV<PV_N>::mma(T[f], P + step * 4, descriptor(low, V_HIGH), k != 0);
#endif
          }
        mma_commit();
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
      // Marks hidden scores.
      auto hide = [&](int tile) {
        uint32_t bits[BLOCK_N / 32];
        if constexpr (KEY_MASK) {
#pragma unroll
          for (int i = 0; i < BLOCK_N / 32; i++) {
            int word = tile * (BLOCK_N / 32) + i;
            bits[i] = word < key_words ? __ldg(key_bits + w.batch * key_words + word) >> 2 * pair : 0;
          }
        }
        const int key = tile * BLOCK_N;
#pragma unroll
        for (int e = 0; e < SCORES; e++) {
          const int at = e / 4 * 8 + (e & 1);
          bool seen = at < (e & 2 ? end1 : end0) - key;
          if constexpr (WINDOW) seen = seen && at >= begin0 + (e & 2 ? 8 : 0) - key;
          if constexpr (KEY_MASK) seen = seen && (bits[at / 32] >> (at & 31) & 1);
          if (!seen) S[e] = HIDDEN;
        }
      };
      // Probabilities in the place of scores.
      auto softmax = [&](auto masked) {
        constexpr bool MASKED = decltype(masked)::value;
        float top0 = m0, top1 = m1;
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; g++) {
          const int* s = S + g * 32;
          int a0 = max(s[0], s[1]), a1 = max(s[2], s[3]);
#pragma unroll
          for (int j = 1; j < 8; j++) {
            a0 = max3(a0, s[4 * j], s[4 * j + 1]);
            a1 = max3(a1, s[4 * j + 2], s[4 * j + 3]);
          }
          // Rounded down, and b below up: the largest score gets its full code however large it is.
          const float t0 = __fmul_rd((float)a0, q0 * kc[g]), t1 = __fmul_rd((float)a1, q1 * kc[g]);
          top0 = MASKED && a0 == HIDDEN ? top0 : fmaxf(top0, t0);
          top1 = MASKED && a1 == HIDDEN ? top1 : fmaxf(top1, t1);
        }
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
        top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2));
        top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2));
        alpha0 = exp2_mufu(m0 - top0);
        alpha1 = exp2_mufu(m1 - top1);
        m0 = top0;
        m1 = top1;
        const float b0 = __fsub_ru(P_LOG2, top0), b1 = __fsub_ru(P_LOG2, top1);
        float r0 = 0.0f, r1 = 0.0f;
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; g++) {
          const float c0 = q0 * kc[g], c1 = q1 * kc[g];
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            float p[8];
#pragma unroll
            for (int e = 0; e < 8; e++) {
              const int s = S[g * 32 + j * 4 + e];
              const float c = e & 2 ? c1 : c0, b = e & 2 ? b1 : b0;
              if (!MASKED && e < POLY)
                p[e] = exp2_parabola(fma_clamped((float)s, c * POLY_SCALE,
                                                 __fmaf_ru(b, POLY_SCALE, POLY_SHIFT * POLY_SCALE)));
              else
                p[e] = exp2_mufu(__fmaf_rn((float)s, c, b));
              if (MASKED && s == HIDDEN) p[e] = 0.0f;
            }
            if constexpr (!ONES) {
              r0 += p[0] + p[1];
              r1 += p[2] + p[3];
              r0 += p[4] + p[5];
              r1 += p[6] + p[7];
            }
#pragma unroll
            for (int e = 0; e < 8; e++) S[g * 32 + j * 4 + e] = __float_as_int(p[e]);
          }
        }
        if constexpr (!ONES) {
          l0 = __fmaf_rn(l0, alpha0, r0);
          l1 = __fmaf_rn(l1, alpha1, r1);
        }
      };
      auto pack = [&](uint32_t (&codes)[CODES]) {
#pragma unroll
        for (int at = 0; at < BLOCK_N / 16; at++) {
          float p[8];
#pragma unroll
          for (int e = 0; e < 8; e++) p[e] = __int_as_float(S[at * 8 + e]);
          if constexpr (HALF_V) {
            codes[at * 4 + 0] = pack_half(p[0], p[1]);
            codes[at * 4 + 1] = pack_half(p[2], p[3]);
            codes[at * 4 + 2] = pack_half(p[4], p[5]);
            codes[at * 4 + 3] = pack_half(p[6], p[7]);
          } else {
            codes[at * 2 + 0] = pack_e4m3(p[0], p[1], p[4], p[5]);
            codes[at * 2 + 1] = pack_e4m3(p[2], p[3], p[6], p[7]);
          }
        }
      };
      auto rescale = [&]() {
#pragma unroll
        for (int e = 0; e < VALUE / 2; e++) O[e] *= e & 2 ? alpha1 : alpha0;
      };

      // First tile: nothing to overlap with yet.
      {
        const int tile = tile_at(w, 0, tile_list, tiles);
        load_scales(Flag<true>(), tile);
        wait(full_q, q_phase);
        q_phase ^= 1;
        wait(full_k + 8 * stage, phase);
        if constexpr (PINGPONG) take_turn(1 + consumer);
        issue_scores();
        if constexpr (PINGPONG) give_turn(2 - consumer);
        mma_wait<0>();
        hold(S);
        if (speaks) arrive(empty_k + 8 * stage);
        if (w.low > 0 || w.whole == 0) {
          hide(tile);
          softmax(Flag<true>());
        } else {
          softmax(Flag<false>());
        }
        pack(P);
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
        if constexpr (decltype(masked)::value) hide(tile);
        softmax(masked);
        // P is an operand until the wait: codes made before it go through an operation that the
        // compiler cannot undo.
        uint32_t codes[CODES];
        if constexpr (!LATE_PACK) pack(codes);
        if constexpr (PINNED) {
          uint32_t all = 0;
#pragma unroll
          for (int e = 0; e < CODES; e++) all |= codes[e];
          asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 1; @p st.shared.b32 [%0], %2;}" ::"r"(barriers),
                       "r"(zero), "r"(all)
                       : "memory");
        }
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
          if constexpr (PIECES == 1) {
            if (speaks) arrive(empty_v + 8 * v_stage);
            add_sums(0);
          } else {
            add_sums(0);
            other_pieces(v_stage);
            if (speaks) arrive(empty_v + 8 * v_stage);
          }
          next0 = a0;
          next1 = a1;
        }
        if constexpr (LATE_PACK) pack(P);
        else
#pragma unroll
          for (int e = 0; e < CODES; e++) P[e] = codes[e] | zero;
      };

      int i = 1;
      if constexpr (WINDOW)
        for (; i < w.low; i++) step(Flag<true>(), i);
      for (; i < w.whole; i++) step(Flag<false>(), i);
      for (; i < w.count; i++) step(Flag<true>(), i);

      if (speaks) arrive(empty_q);
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

      if constexpr (ONES) {
        l0 = __shfl_sync(~0u, l0, lane & ~3);
        l1 = __shfl_sync(~0u, l1, lane & ~3);
      } else {
        l0 += __shfl_xor_sync(~0u, l0, 1);
        l1 += __shfl_xor_sync(~0u, l1, 1);
        l0 += __shfl_xor_sync(~0u, l0, 2);
        l1 += __shfl_xor_sync(~0u, l1, 2);
      }
    }

    // Where the block goes is worked out again rather than kept in registers through the loop.
    int again = share.t;
    asm volatile("" : "+r"(again));
    const Work w = work_of(again, sizes, cu_q, cu_kv, tile_counts);
    int place = threadIdx.x;
    asm volatile("" : "+r"(place));
    const int row = consumer * 64 + (place & 127) / 32 * 16 + (place & 31) / 4;
#if SPLIT
    // Parts of a block of queries: whoever has its first tiles comes to them last, and finds there
    // what the others have left in the place of their number.
    const int me = consumer * 128 + (place & 127);
    constexpr int PART = VALUE / 2 + 4;  // floats of a thread
    if (share.from > 0) {
      float* part = parts + (long long)blockIdx.x * PART * (WARPGROUPS * 128) + me;
#pragma unroll
      for (int e = 0; e < VALUE / 2; e++) part[e * (WARPGROUPS * 128)] = O[e];
      part[(VALUE / 2) * (WARPGROUPS * 128)] = m0;
      part[(VALUE / 2 + 1) * (WARPGROUPS * 128)] = m1;
      part[(VALUE / 2 + 2) * (WARPGROUPS * 128)] = l0;
      part[(VALUE / 2 + 3) * (WARPGROUPS * 128)] = l1;
      __threadfence();
      asm volatile("bar.sync %0, 128;" ::"r"(3 + consumer) : "memory");
      if ((place & 127) == 0)
        asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(ready + blockIdx.x * WARPGROUPS + consumer)
                     : "memory");
      continue;
    }
    if (share.to < ALL) {
      const int end = (share.t - whole + 1) * tiles;
      for (int b = blockIdx.x + 1; Shares::begin_of(sizes, b) < end; b++) {
        int done;
        do {
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                       : "=r"(done) : "l"(ready + b * WARPGROUPS + consumer) : "memory");
        } while (!done);
        const float* part = parts + (long long)b * PART * (WARPGROUPS * 128) + me;
        const float n0 = __ldcg(part + (VALUE / 2) * (WARPGROUPS * 128));
        const float n1 = __ldcg(part + (VALUE / 2 + 1) * (WARPGROUPS * 128));
        const float top0 = fmaxf(m0, n0), top1 = fmaxf(m1, n1);
        const float mine0 = exp2_mufu(m0 - top0), mine1 = exp2_mufu(m1 - top1);
        const float other0 = exp2_mufu(n0 - top0), other1 = exp2_mufu(n1 - top1);
        l0 = l0 * mine0 + other0 * __ldcg(part + (VALUE / 2 + 2) * (WARPGROUPS * 128));
        l1 = l1 * mine1 + other1 * __ldcg(part + (VALUE / 2 + 3) * (WARPGROUPS * 128));
        m0 = top0;
        m1 = top1;
#pragma unroll
        for (int e = 0; e < VALUE / 2; e++)
          O[e] = O[e] * (e & 2 ? mine1 : mine0) +
                 (e & 2 ? other1 : other0) * __ldcg(part + e * (WARPGROUPS * 128));
      }
    }
#endif

    // A row that sees no key gives 0, whatever V holds. V's scale comes last: a sum of many large
    // values may not fit before it is an average.
    const float* channel = v_scale + ((long long)w.member * (q_heads / group) +
                                      (w.head - w.batch * q_heads) / group) * VALUE + 2 * pair;
    uint16_t* to = out + w.batch * out_stride_b + (w.head - w.batch * q_heads) * out_stride_h +
                   (long long)(w.q_row + row) * out_stride_s + 2 * pair;
    const float inverse0 = __fdividef(1.0f, l0), inverse1 = __fdividef(1.0f, l1);
#pragma unroll
    for (int j = 0; j < VALUE / 8; j++) {
      const float c0 = __ldg(channel + j * 8), c1 = __ldg(channel + j * 8 + 1);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float inverse = r ? inverse1 : inverse0;
        const bool empty = (r ? l1 : l0) == 0.0f;
        const float x = empty ? 0.0f : O[j * 4 + 2 * r] * inverse * c0;
        const float y = empty ? 0.0f : O[j * 4 + 2 * r + 1] * inverse * c1;
        const uint32_t both = OUT_HALF ? pack_half(x, y) : pack_bf16(x, y);
        uint16_t* at = to + r * 8 * out_stride_s + j * 8;
        if (row + 8 * r >= w.q_rows) continue;
        if constexpr (VALUE_DIM % 2 == 0) {
          if (VALUE_DIM % 8 == 0 || j * 8 + 2 * pair < VALUE_DIM) *(uint32_t*)at = both;
        } else {
          if (j * 8 + 2 * pair < VALUE_DIM) at[0] = (uint16_t)both;
          if (j * 8 + 2 * pair + 1 < VALUE_DIM) at[1] = (uint16_t)(both >> 16);
        }
      }
    }
    if (lse && pair == 0) {
      const long long at = (long long)w.head * q_len + w.q_row + row;
      const float infinity = __int_as_float(0x7F800000);
      if (row < w.q_rows)
        lse[at] = l0 == 0.0f ? -infinity : (m0 + __log2f(l0) - P_LOG2 + shift_log2[at]) * LN2;
      if (row + 8 < w.q_rows)
        lse[at + 8] = l1 == 0.0f ? -infinity : (m1 + __log2f(l1) - P_LOG2 + shift_log2[at + 8]) * LN2;
    }
  }
  if constexpr (PINGPONG) {
    if (consumer == 0) take_turn(1);
  }
}
