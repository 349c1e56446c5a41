// The softmax of one tile of scores in a thread's registers: hidden keys, running maximum, exp2,
// codes of P. Needs mma_sizes.cuh.
//
// Products start at MAGIC: as fp32, the register of a sum of integers s then reads 1.5 * 2^23 + s,
// exactly, for |s| < 2^22, which 127 * 127 * 256 stays below. That turns the conversion into a
// subtraction on the FMA pipe; on sm_80 it would cost as much as an exponential. Order is kept, so
// that maxima may be taken of the registers.

constexpr int MAGIC = 0x4B400000;
constexpr float MAGIC_FLOAT = 12582912.f;
constexpr int HIDDEN = 0;          // below every sum
constexpr float LOWEST = -3.0e38f;  // maximum of no score
constexpr float LOG2E = 1.4426950408889634f;
constexpr float FLOAT_MAX = 3.402823466e38f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float integer(int sum) { return __int_as_float(sum) - MAGIC_FLOAT; }

// Of the rows g and g + 8 of a tile of 16 rows: scale of Q (with softmax scale and log2(e)), running
// maximum in base 2, running sum of this thread's keys, what earlier sums are scaled by.
struct Rows {
  float q[2], m[2], l[2], alpha[2];
};

// What a thread's two rows see, by position: keys below `end` and from `begin` on, less the first of
// the thread's own in a tile.
struct Seen {
  int end[2], begin[2];
};

// Whether score e of n-tile j of a tile of keys is seen by position.
__device__ __forceinline__ bool sees(const Seen& s, int at, int e) {
  return at < s.end[e / 2] && at >= s.begin[e / 2];
}

// The mask of a call: [B, Hq, Sq, Skv] by strides of elements.
struct Mask {
  const void* at;
  i64 batch, head, row, key;
};

template <int TYPE>
__device__ __forceinline__ float mask_number(const void* at, i64 i) {
  if constexpr (TYPE == FP32) return __ldg((const float*)at + i);
  const u32 half = __ldg((const unsigned short*)at + i);
  return TYPE == BF16 ? __uint_as_float(half << 16) : from_fp16(half);
}

// Marks the scores of a tile that are hidden from my rows. `bits` is that of a mask of keys, moved
// down to the thread's first.
__device__ __forceinline__ void hide(int (&S)[N_TILES][4], const Seen& seen, int key,
                                     const u32 (&bits)[BLOCK_N / 32], const Mask& mask,
                                     const i64 (&mask_rows)[2]) {
#pragma unroll
  for (int j = 0; j < N_TILES; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int at = j * 8 + (e & 1);
      bool keep = sees(seen, key + at, e);
      if constexpr (PLACES) keep = keep && (bits[at / 32] >> (at & 31) & 1);
      if constexpr (MASK == 2)
        if (keep)
          keep = __ldg((const u8*)mask.at + mask_rows[e / 2] + (i64)at * mask.key) != 0;
      if (!keep) S[j][e] = HIDDEN;
    }
}

// Running maximum and sum where one scale serves all keys of a thread in a group of 64: maxima of
// integers. Leaves P_r times the probabilities in place of the scores.
template <bool MASKED>
__device__ __forceinline__ void softmax_of_integers(int (&S)[N_TILES][4],
                                                    const float (&k)[KEY_GROUPS], Rows& r) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int most[KEY_GROUPS];
    float largest[KEY_GROUPS];
    float top = r.m[i];
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; g++) {
      most[g] = HIDDEN;
#pragma unroll
      for (int j = g * 8; j < g * 8 + 8; j++)
        most[g] = max(most[g], max(S[j][2 * i], S[j][2 * i + 1]));
      largest[g] = integer(most[g]) * (r.q[i] * k[g]);
      top = MASKED && most[g] == HIDDEN ? top : fmaxf(top, largest[g]);
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    r.alpha[i] = exp2_mufu(r.m[i] - top);
    r.m[i] = top;
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; g++) {
      // Relative to the group's largest integer, which is exact: no code exceeds P_r, and the largest
      // score gets it, however large scores are.
      const float scale = r.q[i] * k[g], add = (largest[g] - top) + P_LOG2;
      const float from = __int_as_float(most[g]);
#pragma unroll
      for (int j = g * 8; j < g * 8 + 8; j++)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) {
          float p = exp2_mufu(__fmaf_rn(__int_as_float(S[j][e]) - from, scale, add));
          if (MASKED && S[j][e] == HIDDEN) p = 0.f;
          sum += p;
          S[j][e] = __float_as_int(p);
        }
    }
    r.l[i] = __fmaf_rn(r.l[i], r.alpha[i], sum);
  }
}

// tanh(x), to a few units in the last place; for large |x| by exponentials, near 0 by a polynomial,
// where those would cancel.
__device__ __forceinline__ float tanh_of(float x) {
  const float square = x * x;
  const float small =
      x * (1.f + square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315))));
  const float e = exp2_mufu(fabsf(x) * (-2.f * LOG2E));
  const float large = copysignf(__fdividef(1.f - e, 1.f + e), x);
  return fabsf(x) < 0.2f ? small : large;  // NaN stays
}

// What a score becomes on its way to the maximum, beside the scales.
struct Terms {
  const float* scales;  // of the tile's keys from the thread's first on, with BY_TOKEN
  const float* means;   // scores of the mean of the queries, with SMOOTH_Q
  float shift[2];       // what smoothing K took from the rows' scores, with SOFTCAP
  float cap;            // soft cap in base 2
};

// The same for scores that are more than an integer times a scale.
template <bool MASKED>
__device__ __forceinline__ void softmax_of_floats(int (&S)[N_TILES][4],
                                                  const float (&k)[KEY_GROUPS], Rows& r,
                                                  const Terms& t, const Mask& mask,
                                                  const i64 (&mask_rows)[2]) {
#pragma unroll
  for (int j = 0; j < N_TILES; j++) {
    float scale[2] = {k[j / 8], k[j / 8]}, mean[2] = {0.f, 0.f};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if constexpr (BY_TOKEN) scale[e] = t.scales[j * 8 + e];
      if constexpr (SMOOTH_Q) mean[e] = t.means[j * 8 + e];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float s = integer(S[j][e]) * r.q[e / 2] * scale[e & 1];
      if constexpr (SMOOTH_Q)
        s = __fmaf_rn(integer(S[j][e]), r.q[e / 2] * scale[e & 1], mean[e & 1]);
      if constexpr (SOFTCAP) s = t.cap * tanh_of(__fdividef(s + t.shift[e / 2], t.cap));
      if constexpr (MASKED) {
        bool keep = S[j][e] != HIDDEN;
        if constexpr (ADDITIVE) {
          if (keep) {
            const i64 at = mask_rows[e / 2] + (i64)(j * 8 + (e & 1)) * mask.key;
            const float add = mask_number<MASK_TYPE>(mask.at, at);
            keep = add != -infinity();
            s = __fmaf_rn(add, LOG2E, s);
            // finfo.min times log2(e) is -inf: back to the lowest number, as finfo.max to the
            // highest. NaN stays, and what is infinite in the mask becomes it.
            s = s < -FLOAT_MAX ? -FLOAT_MAX : s;
            if (s == infinity() && add != infinity()) s = FLOAT_MAX;
          }
        }
        s = keep ? s : -infinity();
      }
      S[j][e] = __float_as_int(s);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float top = r.m[i];
#pragma unroll
    for (int j = 0; j < N_TILES; j++)
      top = fmaxf(top, fmaxf(__int_as_float(S[j][2 * i]), __int_as_float(S[j][2 * i + 1])));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    // Where no key is seen yet the maximum is -inf, and -inf - -inf would be NaN.
    const float base = top == -infinity() ? 0.f : top;
    r.alpha[i] = exp2_mufu(r.m[i] - base);
    r.m[i] = top;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < N_TILES; j++)
#pragma unroll
      for (int e = 2 * i; e < 2 * i + 2; e++) {
        const float x = __int_as_float(S[j][e]) - base;
        const float p = exp2_mufu(P_LOG2 == 0.f ? x : x + P_LOG2);
        sum += p;
        S[j][e] = __float_as_int(p);
      }
    r.l[i] = __fmaf_rn(r.l[i], r.alpha[i], sum);
  }
}

// Four INT8 codes of numbers from 0 to 127: adding MAGIC_FLOAT leaves rint(x) in the lowest byte.
__device__ __forceinline__ u32 int8_codes(float a, float b, float c, float d) {
  const u32 low = __byte_perm(__float_as_uint(a + MAGIC_FLOAT), __float_as_uint(b + MAGIC_FLOAT),
                              0x0040);
  const u32 high = __byte_perm(__float_as_uint(c + MAGIC_FLOAT), __float_as_uint(d + MAGIC_FLOAT),
                               0x0040);
  return __byte_perm(low, high, 0x5410);
}

// The operand P of the second product: of each PV_KEYS keys the four registers of a fragment. With
// 8-bit codes the order of keys is that in which the pre-pass laid V.
__device__ __forceinline__ void pack(const int (&S)[N_TILES][4], u32 (&codes)[CODES]) {
  const auto p = [&](int j, int e) { return __int_as_float(S[j][e]); };
#pragma unroll
  for (int at = 0; at < BLOCK_N / 16; at++) {
    const int j = 2 * at;
    if constexpr (PV == PV_FP16) {
      codes[at * 4 + 0] = fp16x2(p(j, 0), p(j, 1));
      codes[at * 4 + 1] = fp16x2(p(j, 2), p(j, 3));
      codes[at * 4 + 2] = fp16x2(p(j + 1, 0), p(j + 1, 1));
      codes[at * 4 + 3] = fp16x2(p(j + 1, 2), p(j + 1, 3));
    } else if constexpr (PV == PV_E4M3) {
      codes[at * 2 + 0] = e4m3x4(p(j, 0), p(j, 1), p(j + 1, 0), p(j + 1, 1));
      codes[at * 2 + 1] = e4m3x4(p(j, 2), p(j, 3), p(j + 1, 2), p(j + 1, 3));
    } else {
      codes[at * 2 + 0] = int8_codes(p(j, 0), p(j, 1), p(j + 1, 0), p(j + 1, 1));
      codes[at * 2 + 1] = int8_codes(p(j, 2), p(j, 3), p(j + 1, 2), p(j + 1, 3));
    }
  }
}
