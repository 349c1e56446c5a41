// What becomes of a block of queries after its last tile: parts of it put together, normalised,
// written in the caller's order. Needs attention_sizes.cuh.

constexpr float LN2 = 0.6931471805599453f;
// Threads that compute, and floats that each leaves of a part: O, two maxima, two sums.
constexpr int COMPUTING = WARPGROUPS * 128;
constexpr int PART = VALUE / 2 + 4;

// Row sums of mine made whole: by the four threads of a row.
static __device__ __forceinline__ void sum_quad(float& l0, float& l1, int lane) {
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

// Leaves my part of a block for the one who has its first tiles, as number blockIdx.x. `me` counts
// the threads that compute; `ready` has a word for each part and warpgroup.
static __device__ __forceinline__ void leave_part(const float (&O)[VALUE / 2], float m0, float m1,
                                                  float l0, float l1, float* parts, int* ready,
                                                  int me) {
  float* part = parts + (long long)blockIdx.x * PART * COMPUTING + me;
#pragma unroll
  for (int e = 0; e < VALUE / 2; e++) part[e * COMPUTING] = O[e];
  part[(VALUE / 2) * COMPUTING] = m0;
  part[(VALUE / 2 + 1) * COMPUTING] = m1;
  part[(VALUE / 2 + 2) * COMPUTING] = l0;
  part[(VALUE / 2 + 3) * COMPUTING] = l1;
  __threadfence();
  meet(me / 128);
  // Predicated, not branched: the registers of a warp stay uniform in the loop around.
  asm volatile("{.reg .pred first; setp.eq.s32 first, %1, 0;"
               "@first st.release.gpu.global.s32 [%0], 1;}"
               :: "l"(ready + blockIdx.x * WARPGROUPS + me / 128), "r"(me % 128) : "memory");
}

// Adds part number `b` to mine, once it is there.
static __device__ __forceinline__ void take_part(float (&O)[VALUE / 2], float& m0, float& m1,
                                                 float& l0, float& l1, const float* parts,
                                                 const int* ready, int me, int b) {
  int done;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(done) : "l"(ready + b * WARPGROUPS + me / 128) : "memory");
  } while (!__all_sync(~0u, done));  // one branch for the warp: its registers stay uniform
  const float* part = parts + (long long)b * PART * COMPUTING + me;
  const float n0 = __ldcg(part + (VALUE / 2) * COMPUTING);
  const float n1 = __ldcg(part + (VALUE / 2 + 1) * COMPUTING);
  const float top0 = fmaxf(m0, n0), top1 = fmaxf(m1, n1);
  const float mine0 = exp2_mufu(m0 - top0), mine1 = exp2_mufu(m1 - top1);
  const float other0 = exp2_mufu(n0 - top0), other1 = exp2_mufu(n1 - top1);
  l0 = l0 * mine0 + other0 * __ldcg(part + (VALUE / 2 + 2) * COMPUTING);
  l1 = l1 * mine1 + other1 * __ldcg(part + (VALUE / 2 + 3) * COMPUTING);
  m0 = top0;
  m1 = top1;
#pragma unroll
  for (int e = 0; e < VALUE / 2; e++)
    O[e] = O[e] * (e & 2 ? mine1 : mine0) +
           (e & 2 ? other1 : other0) * __ldcg(part + e * COMPUTING);
}

// Four words of each of four neighbouring threads, transposed: thread p gets word p of all of them.
static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int p) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (k & bit) continue;
      const uint32_t given = p & bit ? x[k] : x[k | bit];
      const uint32_t taken = __shfl_xor_sync(~0u, given, bit);
      if (p & bit) x[k] = taken;
      else x[k | bit] = taken;
    }
}

// Writes my two rows, `row` of the block and row + 8: `to` points at the first column of `row`,
// `channel` (scales of V) at my first, 2 `pair`. A row that sees no key gives 0, whatever V holds.
// V's scale is last: a sum of many large values may not fit before it is an average. Says whether
// all that it wrote is finite.
static __device__ __forceinline__ bool store_rows(const float (&O)[VALUE / 2], float l0, float l1,
                                                  const float* channel, uint16_t* to,
                                                  long long out_stride_s, int row, int q_rows,
                                                  int pair) {
  const float inverse0 = __fdividef(1.0f, l0), inverse1 = __fdividef(1.0f, l1);
  // Columns of eight: a thread holds two of each, and writes all of every fourth where rows start
  // at multiples of 16 bytes.
  constexpr int EIGHTS = VALUE / 8;
  uint32_t largest[2] = {};  // magnitudes in `row` and row + 8, two of 16 bits each
#pragma unroll
  for (int first = 0; first < EIGHTS; first += 4) {
    uint32_t both[2][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int j = first + k;
      if (j * 8 >= VALUE_PADDED) continue;
      const float2 c =
          RAW_V ? make_float2(1.0f, 1.0f) : __ldg(reinterpret_cast<const float2*>(channel + j * 8));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float inverse = i ? inverse1 : inverse0;
        const bool empty = (i ? l1 : l0) == 0.0f;
        const float x = empty ? 0.0f : O[j * 4 + 2 * i] * inverse * c.x;
        const float y = empty ? 0.0f : O[j * 4 + 2 * i + 1] * inverse * c.y;
        both[i][k] = OUT_HALF ? pack_half(x, y) : pack_bf16(x, y);
        largest[i] = __vmaxu2(largest[i], both[i][k] & 0x7FFF7FFFu);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint16_t* at = to + i * 8 * out_stride_s;
      const bool inside = row + 8 * i < q_rows;
      if constexpr (VALUE_DIM % 8 == 0) {
        transpose_quad(both[i], pair);
        const int column = (first + pair) * 8;
        if (inside && column < VALUE_DIM)
          *reinterpret_cast<uint4*>(at + column) =
              make_uint4(both[i][0], both[i][1], both[i][2], both[i][3]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int column = (first + k) * 8 + 2 * pair;
          if (inside && column < VALUE_DIM) at[column] = (uint16_t)both[i][k];
          if (inside && column + 1 < VALUE_DIM) at[column + 1] = (uint16_t)(both[i][k] >> 16);
        }
      }
    }
  }
  constexpr uint32_t infinity = OUT_HALF ? 0x7C007C00u : 0x7F807F80u;
  return !((row < q_rows && __vcmpgeu2(largest[0], infinity)) ||
           (row + 8 < q_rows && __vcmpgeu2(largest[1], infinity)));
}

// Writes the natural log-sum-exp of my two rows; `at` is the place of the first one. -inf for a row
// that sees no key.
static __device__ __forceinline__ void store_lse(float m0, float m1, float l0, float l1, float* lse,
                                                 const float* shift_log2, long long at, int row,
                                                 int q_rows) {
  const float none = -__int_as_float(0x7F800000);
  if (row < q_rows)
    lse[at] = l0 == 0.0f ? none : (m0 + __log2f(l0) - P_LOG2 + shift_log2[at]) * LN2;
  if (row + 8 < q_rows)
    lse[at + 8] = l1 == 0.0f ? none : (m1 + __log2f(l1) - P_LOG2 + shift_log2[at + 8]) * LN2;
}
