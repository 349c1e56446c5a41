// The two products of a tile, as they are issued. Needs attention_sizes.cuh.

// S = Q K^T of one tile: `q` and `k` are the low words of their descriptors.
static __device__ __forceinline__ void issue_product(int (&S)[SCORES], uint32_t q, uint32_t k) {
#pragma unroll
  for (int step = 0; step < HEAD / 32; step++)
    mma_qk(S, descriptor(q + step / 4 * (BLOCK_M * SWIZZLE >> 4) + step % 4 * 2, QK_HIGH),
           descriptor(k + step / 4 * (BLOCK_N * SWIZZLE >> 4) + step % 4 * 2, QK_HIGH),
           step != 0);
  mma_commit();
}

// Part `piece` of P V of one tile, to T or with IN_PLACE to O: `v` is the low word of V's descriptor.
static __device__ __forceinline__ void issue_product(float (&O)[VALUE / 2],
                                                     Accumulator (&T)[FLUSHES][T_REGISTERS],
                                                     const uint32_t (&P)[CODES], uint32_t v,
                                                     int piece) {
#pragma unroll
  for (int f = 0; f < FLUSHES; f++)
#pragma unroll
    for (int k = 0; k < FLUSH / PV_K; k++) {
      const int step = f * (FLUSH / PV_K) + k;
      uint32_t low = v;
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
}
