// What becomes of a block of queries after its last tile: parts of it put together, normalised,
// written in the caller's order. Needs attention_sizes.cuh.

constexpr float LN2 = 0.6931471805599453f;
// Threads that compute, and floats that each leaves of a part: O, two maxima, two sums.
constexpr int COMPUTING = WARPGROUPS * 128;
constexpr int PART = VALUE / 2 + 4;

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
  asm volatile("bar.sync %0, 128;" ::"r"(3 + me / 128) : "memory");
  if (me % 128 == 0)
    asm volatile("st.release.gpu.global.s32 [%0], 1;"
                 :: "l"(ready + blockIdx.x * WARPGROUPS + me / 128) : "memory");
}

// Adds part number `b` to mine, once it is there.
static __device__ __forceinline__ void take_part(float (&O)[VALUE / 2], float& m0, float& m1,
                                                 float& l0, float& l1, const float* parts,
                                                 const int* ready, int me, int b) {
  int done;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(done) : "l"(ready + b * WARPGROUPS + me / 128) : "memory");
  } while (!done);
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

// Writes my two rows, `row` of the block and row + 8: `to` and `channel` (scales of V) point at my
// first column of `row`, 2 `pair`. A row that sees no key gives 0, whatever V holds. V's scale is
// last: a sum of many large values may not fit before it is an average.
static __device__ __forceinline__ void store_rows(const float (&O)[VALUE / 2], float l0, float l1,
                                                  const float* channel, uint16_t* to,
                                                  long long out_stride_s, int row, int q_rows,
                                                  int pair) {
  const float inverse0 = __fdividef(1.0f, l0), inverse1 = __fdividef(1.0f, l1);
#pragma unroll
  for (int j = 0; j < VALUE / 8; j++) {
    const float c0 = j * 8 < VALUE_PADDED ? __ldg(channel + j * 8) : 0.0f;
    const float c1 = j * 8 < VALUE_PADDED ? __ldg(channel + j * 8 + 1) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float inverse = i ? inverse1 : inverse0;
      const bool empty = (i ? l1 : l0) == 0.0f;
      const float x = empty ? 0.0f : O[j * 4 + 2 * i] * inverse * c0;
      const float y = empty ? 0.0f : O[j * 4 + 2 * i + 1] * inverse * c1;
      const uint32_t both = OUT_HALF ? pack_half(x, y) : pack_bf16(x, y);
      uint16_t* at = to + i * 8 * out_stride_s + j * 8;
      if (row + 8 * i >= q_rows) continue;
      if constexpr (VALUE_DIM % 2 == 0) {
        if (VALUE_DIM == VALUE || j * 8 + 2 * pair < VALUE_DIM) *(uint32_t*)at = both;
      } else {
        if (j * 8 + 2 * pair < VALUE_DIM) at[0] = (uint16_t)both;
        if (j * 8 + 2 * pair + 1 < VALUE_DIM) at[1] = (uint16_t)(both >> 16);
      }
    }
  }
}
