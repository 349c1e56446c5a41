// The softmax of one tile of scores in a thread's registers: hidden keys, running maximum, exp2,
// codes of P. Needs attention_sizes.cuh; knows no memory but the bits of a key mask.

constexpr int HIDDEN = -2147483647 - 1;  // a score that no product reaches
constexpr float LOWEST = -3.0e38f;       // maximum of no score

// Keys that a thread's rows see, less the first of its own in a tile.
struct Seen {
  int end0, end1, begin0;  // by position
  const uint32_t* bits;    // by mask, with KEY_MASK: of the batch member, `words` of them, of which
  int words, shift;        // each is to be moved down by `shift`
};

// Marks the scores of a tile that are hidden from my rows.
static __device__ __forceinline__ void hide(int (&S)[SCORES], int tile, const Seen& rows) {
  uint32_t bits[BLOCK_N / 32];
  if constexpr (KEY_MASK) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 32; i++) {
      int word = tile * (BLOCK_N / 32) + i;
      bits[i] = word < rows.words ? __ldg(rows.bits + word) >> rows.shift : 0;
    }
  }
  const int key = tile * BLOCK_N;
#pragma unroll
  for (int e = 0; e < SCORES; e++) {
    const int at = e / 4 * 8 + (e & 1);
    bool seen = at < (e & 2 ? rows.end1 : rows.end0) - key;
    if constexpr (WINDOW) seen = seen && at >= rows.begin0 + (e & 2 ? 8 : 0) - key;
    if constexpr (KEY_MASK) seen = seen && (bits[at / 32] >> (at & 31) & 1);
    if (!seen) S[e] = HIDDEN;
  }
}

// With LAG probabilities may grow to 2^LAG before the maximum that they refer to moves: it seldom
// does, and they are as exact as those to 1. Where nothing is in flight all is scaled at once then.
constexpr bool AT_ONCE = LAG > 0 && SERIAL;

// Probabilities in the place of the scores of a tile. `k` are the scales of its groups of keys, q
// those of my two rows (with softmax scale and log2(e)), m their running maximum in base 2, l their
// running sum unless the tensor core has it, alpha what the tile scales earlier sums by. AT_ONCE
// `rescale` does that. CAPPED: no score is far over m, which stays.
template <bool MASKED, bool CAPPED, class Rescale>
static __device__ __forceinline__ void softmax(int (&S)[SCORES], const float (&k)[KEY_GROUPS],
                                               float q0, float q1, float& m0, float& m1, float& l0,
                                               float& l1, float& alpha0, float& alpha1,
                                               const Rescale& rescale) {
  float top0 = m0, top1 = m1;
#pragma unroll
  for (int g = 0; !CAPPED && g < KEY_GROUPS; g++) {
    const int* s = S + g * 32;
    int a0 = max(s[0], s[1]), a1 = max(s[2], s[3]);
#pragma unroll
    for (int j = 1; j < 8; j++) {
      a0 = max3(a0, s[4 * j], s[4 * j + 1]);
      a1 = max3(a1, s[4 * j + 2], s[4 * j + 3]);
    }
    // Rounded down, and b below up: the largest score gets its full code however large it is.
    const float t0 = __fmul_rd((float)a0, q0 * k[g]), t1 = __fmul_rd((float)a1, q1 * k[g]);
    top0 = MASKED && a0 == HIDDEN ? top0 : fmaxf(top0, t0);
    top1 = MASKED && a1 == HIDDEN ? top1 : fmaxf(top1, t1);
  }
  // One branch for the warp: its registers stay uniform.
  if (!CAPPED && (!AT_ONCE || __any_sync(~0u, top0 > m0 + LAG || top1 > m1 + LAG))) {
    top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 1));
    top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 1));
    top0 = fmaxf(top0, __shfl_xor_sync(~0u, top0, 2));
    top1 = fmaxf(top1, __shfl_xor_sync(~0u, top1, 2));
    if (LAG > 0 && !(top0 > m0 + LAG)) top0 = m0;
    if (LAG > 0 && !(top1 > m1 + LAG)) top1 = m1;
    alpha0 = exp2_mufu(m0 - top0);
    alpha1 = exp2_mufu(m1 - top1);
    m0 = top0;
    m1 = top1;
    if constexpr (AT_ONCE) {
      l0 *= alpha0;
      l1 *= alpha1;
      rescale();
    }
  }
  const float b0 = __fsub_ru(P_LOG2, m0), b1 = __fsub_ru(P_LOG2, m1);
  float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
  for (int g = 0; g < KEY_GROUPS; g++) {
    const float c0 = q0 * k[g], c1 = q1 * k[g];
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
        sum0 += p[0] + p[1];
        sum1 += p[2] + p[3];
        sum0 += p[4] + p[5];
        sum1 += p[6] + p[7];
      }
#pragma unroll
      for (int e = 0; e < 8; e++) S[g * 32 + j * 4 + e] = __float_as_int(p[e]);
    }
  }
  if constexpr (!ONES) {
    l0 = AT_ONCE ? l0 + sum0 : __fmaf_rn(l0, alpha0, sum0);
    l1 = AT_ONCE ? l1 + sum1 : __fmaf_rn(l1, alpha1, sum1);
  }
}

// The operand P of the second product.
static __device__ __forceinline__ void pack(const int (&S)[SCORES], uint32_t (&codes)[CODES]) {
#pragma unroll
  for (int at = 0; at < BLOCK_N / 16; at++) {
    float p[8];
#pragma unroll
    for (int e = 0; e < 8; e++) p[e] = __int_as_float(S[at * 8 + e]);
    if constexpr (HALF_V) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        codes[at * 4 + i] =
            BF16_V ? pack_bf16(p[2 * i], p[2 * i + 1]) : pack_half(p[2 * i], p[2 * i + 1]);
    } else {
      codes[at * 2 + 0] = pack_e4m3(p[0], p[1], p[4], p[5]);
      codes[at * 2 + 1] = pack_e4m3(p[2], p[3], p[6], p[7]);
    }
  }
}
