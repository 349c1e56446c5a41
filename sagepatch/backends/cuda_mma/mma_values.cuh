// The second product of one tile: O = O alpha + P V, summed as the recipe says. Needs
// mma_softmax.cuh.

// Sums of a product of 16 rows and 8 columns, as the tensor core leaves them.
template <int PV_KIND, bool HALF>
struct Sums {
  float s[4];
  __device__ __forceinline__ void clear() { s[0] = s[1] = s[2] = s[3] = 0.f; }
  __device__ __forceinline__ float operator[](int e) const { return s[e]; }
  __device__ __forceinline__ void add(const u32* p, u32 b0, u32 b1) {
    if constexpr (PV_KIND == PV_FP16)
      mma_f16(s, p, b0, b1, s);
    else
      mma_e4m3(s, p, b0, b1, s);
  }
};

template <int PV_KIND>
struct Sums<PV_KIND, true> {
  u32 s[2];  // pairs of columns of rows g and g + 8
  __device__ __forceinline__ void clear() { s[0] = s[1] = 0; }
  __device__ __forceinline__ float operator[](int e) const {
    return e & 1 ? from_fp16_pair<1>(s[e / 2]) : from_fp16_pair<0>(s[e / 2]);
  }
  __device__ __forceinline__ void add(const u32* p, u32 b0, u32 b1) {
    if constexpr (PV_KIND == PV_FP16)
      mma_f16(s, p, b0, b1, s);
    else
      mma_e4m3(s, p, b0, b1, s);
  }
};

// At most 64 * 127 * 127 in size, below 2^22: read as scores are.
template <>
struct Sums<PV_INT8, false> {
  int s[4];
  __device__ __forceinline__ void clear() { s[0] = s[1] = s[2] = s[3] = MAGIC; }
  __device__ __forceinline__ float operator[](int e) const { return integer(s[e]); }
  __device__ __forceinline__ void add(const u32* p, u32 b0, u32 b1) { mma_i8(s, p, b0, b1, s); }
};

// The operand V of 8 columns and all keys of a tile, two registers a product.
__device__ __forceinline__ void load_values(u32 (&b)[BLOCK_N / PV_KEYS * 2], u32 v_at, int column,
                                            int thread) {
  const int lane = thread & 31;
#pragma unroll
  for (int i = 0; i < BLOCK_N / PV_KEYS / 2; i++) {
    u32 four[4];
    if constexpr (PV == PV_FP16)
      load_matrices_transposed(four, v_at + place<V_ROW_BYTES>(i * 32 + lane, column));
    else
      load_matrices(four, v_at + place<V_ROW_BYTES>(column * 8 + (lane & 7), i * 4 + lane / 8));
#pragma unroll
    for (int x = 0; x < 4; x++) b[i * 4 + x] = four[x];
  }
}

__device__ __forceinline__ void add_values(float (&O)[M_TILES][V_TILES][4],
                                           const u32 (&P)[M_TILES][CODES],
                                           const Rows (&rows)[M_TILES], u32 v_at) {
  if constexpr (IN_PLACE) {
    // Most tiles leave every maximum as it was.
    bool changed = false;
#pragma unroll
    for (int mt = 0; mt < M_TILES; mt++)
      changed = changed || rows[mt].alpha[0] != 1.f || rows[mt].alpha[1] != 1.f;
    if (__any_sync(~0u, changed)) {
#pragma unroll
      for (int mt = 0; mt < M_TILES; mt++)
#pragma unroll
        for (int n = 0; n < V_TILES; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) O[mt][n][e] *= rows[mt].alpha[e / 2];
    }
  }
  const int thread = anew(threadIdx.x);
#pragma unroll
  for (int n = 0; n < V_TILES; n++) {
    u32 b[BLOCK_N / PV_KEYS * 2];
    load_values(b, v_at, n, thread);
#pragma unroll
    for (int mt = 0; mt < M_TILES; mt++) {
      if constexpr (IN_PLACE) {
#pragma unroll
        for (int step = 0; step < BLOCK_N / PV_KEYS; step++) {
          float(&o)[4] = O[mt][n];
          if constexpr (PV == PV_FP16)
            mma_f16(o, P[mt] + step * 4, b[step * 2], b[step * 2 + 1], o);
          else
            mma_e4m3(o, P[mt] + step * 4, b[step * 2], b[step * 2 + 1], o);
        }
      } else {
#pragma unroll
        for (int f = 0; f < FLUSHES; f++) {
          Sums<PV, HALF_SUM> sums;
          sums.clear();
#pragma unroll
          for (int k = 0; k < FLUSH_STEPS; k++) {
            const int step = f * FLUSH_STEPS + k;
            sums.add(P[mt] + step * 4, b[step * 2], b[step * 2 + 1]);
          }
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float& o = O[mt][n][e];
            o = f ? o + sums[e] : __fmaf_rn(o, rows[mt].alpha[e / 2], sums[e]);
          }
        }
      }
    }
  }
}
