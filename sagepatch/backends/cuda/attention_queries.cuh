// What attention does with its queries before the first tile. The largest score that they can have,
// and, with RAW_Q: codes of Q made where they are used, from rows that lie in shared memory as the caller
// gave them; arithmetic and codes are those of quantise.cuh. A warp makes its own 16 rows.
// Needs attention_sizes.cuh and codes.cuh.

#if CAP
// No score of a row in base 2 is larger: Cauchy and Schwarz. `codes` are those of the block, `scale`
// the row's, `k_norm` the largest squared length of a key's codes times its scale. By the four
// threads of a row.
static __device__ __forceinline__ float most_score(const uint8_t* codes, int row, int pair,
                                                   float scale, float k_norm) {
  int squares = 0;
#pragma unroll
  for (int sixteen = 0; sixteen < HEAD / 16; sixteen += 4) {
    const int mine = sixteen + pair;
    if (mine >= HEAD / 16) break;
    const uint32_t at = swizzled(row * SWIZZLE + mine % 8 * 16, SWIZZLE);
    const uint4 four =
        *reinterpret_cast<const uint4*>(codes + mine / 8 * BLOCK_M * SWIZZLE + at);
    squares = __dp4a((int)four.x, (int)four.x, squares);
    squares = __dp4a((int)four.y, (int)four.y, squares);
    squares = __dp4a((int)four.z, (int)four.z, squares);
    squares = __dp4a((int)four.w, (int)four.w, squares);
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  return scale * 1.001f * sqrtf((float)squares * k_norm);
}
#endif

#if RAW_Q
constexpr int Q_TYPE = RAW_Q == 1 ? FP16 : BF16;
// Neighbouring threads that read one row, eight columns each; rows of a warp at once.
constexpr int Q_LANES = power_of_two(HEAD / 8);
constexpr int Q_ROWS = 32 / Q_LANES;
constexpr int Q_PASSES = 16 / Q_ROWS;
static_assert(Q_PASSES <= Q_LANES, "a thread would hold the scales of two rows");

// `raw` and `codes` are the rows of this warpgroup, number `consumer`; `from` is released by `empty`
// once they are read. `factor` is the softmax scale times log2(e). Gives the scales of my two rows.
static __device__ __forceinline__ void quantise_queries(const uint8_t* raw, uint8_t* codes,
                                                        uint32_t empty, float factor, int consumer,
                                                        int lane, int warp, float& q0, float& q1) {
  const int column = lane % Q_LANES, row = warp * 16 + lane / Q_LANES;
  Eight<Q_TYPE> x[Q_PASSES];
  float peaks[Q_PASSES];
#pragma unroll
  for (int p = 0; p < Q_PASSES; p++) {
    x[p].clear();
    if (column * 8 < HEAD) {
      const uint4 four =
          *reinterpret_cast<const uint4*>(raw + ((row + p * Q_ROWS) * HEAD + column * 8) * 2);
      x[p].word[0] = four.x, x[p].word[1] = four.y, x[p].word[2] = four.z, x[p].word[3] = four.w;
    }
    peaks[p] = peak_of(x[p]);
  }
  __syncwarp();
  if (lane == 0) arrive(empty);
  // Thread number t of a row holds the scale of pass t / SHARE.
  constexpr int SHARE = Q_LANES / Q_PASSES;
  const Scaling q = scaling(over_threads<Largest, Q_LANES>(peaks), MOST_INT8);
  const float inverse = factor < 0.0f ? -q.inverse : q.inverse;
  const float scale = at_most(__fmul_rn(q.scale, fabsf(factor)), MOST_Q_SCALE);
  meet(consumer);  // the last products have read the codes that were here
#pragma unroll
  for (int p = 0; p < Q_PASSES; p++) {
    const float by = __shfl_sync(~0u, inverse, p * SHARE, Q_LANES);
    if (column * 8 < HEAD) {
      const int panel = column / 16, within = column % 16 * 8;
      const uint32_t at = swizzled((row + p * Q_ROWS) * SWIZZLE + within, SWIZZLE);
      *reinterpret_cast<uint2*>(codes + panel * BLOCK_M * SWIZZLE + at) =
          make_uint2(int8x4(x[p][0], x[p][1], x[p][2], x[p][3], by),
                     int8x4(x[p][4], x[p][5], x[p][6], x[p][7], by));
    }
  }
  const int mine = lane >> 2;  // and the row 8 under it
  q0 = __shfl_sync(~0u, scale, mine % Q_ROWS * Q_LANES + mine / Q_ROWS * SHARE);
  q1 = __shfl_sync(~0u, scale, (mine + 8) % Q_ROWS * Q_LANES + (mine + 8) / Q_ROWS * SHARE);
  share_writes();
  meet(consumer);
}
#endif
