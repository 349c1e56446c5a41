// The one thread that copies: Q of a block, K and V of its tiles, into shared memory as the stages
// there come free. Needs attention_work.cuh.

// Where they go: Q, the stages of K and of V, with RAW_Q the rows of Q as the caller gave them.
struct Places {
  uint32_t q, k, v, raw_q;
};

// All of my block of threads in its `turns`.
static __device__ __forceinline__ void copy_operands(
    const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map, const Places& at,
    const Barriers& b, const Sizes& sizes, int turns, const int* cu_q, const int* cu_kv,
    const int* tile_list, const int* tile_counts) {
  int stage = 0;
  uint32_t phase = 0, q_phase = 0;
  Dealt dealt(sizes);
  for (int t = blockIdx.x; t < turns; t += gridDim.x) {
    const Share share = dealt.take(sizes, t);
    Work w = work_of(share.t, sizes, cu_q, cu_kv, tile_counts);
    restrict_to(w, share);
    if (w.count <= 0) continue;
    const int kv_head_of_batch =
        RAW_V ? w.kv_head - w.batch * (sizes.q_heads / sizes.group) : 0;
    wait(b.empty_q, q_phase ^ 1);
    q_phase ^= 1;
    if constexpr (RAW_Q) {
      expect_bytes(b.full_q, RAW_Q_BYTES);
      load_box(at.raw_q, q_map, b.full_q, 0, w.q_row, w.head - w.batch * sizes.q_heads, w.batch);
    } else {
      expect_bytes(b.full_q, Q_BYTES);
      for (int p = 0; p < PANELS; p++)
        load_box(at.q + p * BLOCK_M * SWIZZLE, q_map, b.full_q, p * 128, w.q_row, w.head);
    }
    for (int i = 0; i < w.count; i++) {
      int tile = tile_at(w, i, tile_list, sizes.tiles);
      int key = w.kv_row + tile * BLOCK_N;
      wait(b.empty_k + 8 * stage, phase ^ 1);
      expect_bytes(b.full_k + 8 * stage, K_BYTES);
      for (int p = 0; p < PANELS; p++)
        load_box(at.k + stage * K_BYTES + p * BLOCK_N * SWIZZLE, k_map, b.full_k + 8 * stage,
                 p * 128, key, w.kv_head);
      wait(b.empty_v + 8 * stage, phase ^ 1);
      expect_bytes(b.full_v + 8 * stage, V_LOADED_BYTES);
      for (int p = 0; p < V_PANELS; p++) {
        uint32_t to = at.v + stage * V_BYTES + p * V_PANEL_BYTES;
        if constexpr (RAW_V)
          load_box(to, v_map, b.full_v + 8 * stage, p * 64, key, kv_head_of_batch, w.batch);
        else if (HALF_V) load_box(to, v_map, b.full_v + 8 * stage, p * 64, key, w.kv_head);
        else load_box(to, v_map, b.full_v + 8 * stage, key + p * V_SWIZZLE, 0, w.kv_head);
      }
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
  }
}
