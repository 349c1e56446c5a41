// Which rows and keys a block of queries has: order of blocks, causal and window bounds, members of
// packed calls, tiles that a mask leaves. Needs mma_sizes.cuh; knows no scores.

// As an offset, and as a window: hides nothing. Sums of positions stay within 32 bits.
constexpr int EVERYTHING = 1 << 29, NO_WINDOW = 3 << 29;

struct Sizes {
  int heads, q_heads, group;  // batch * query heads; query heads; of them a key head
  int q_len, kv_len, kv_pad;  // totals in a packed call; rows of keys of one head
  int m_blocks, section;      // blocks of queries of a head; causal: heads that run together
  // Keys up to row + causal_offset and after row + causal_offset - window are seen. Members of a
  // packed call.
  int causal_offset, window, members;
  int by_batch, by_head, by_block;  // strides of entries of tile states
  int out_type;                     // 0 fp16, 1 bf16, 2 fp32
  float cap_log2;                   // soft cap in base 2
};

struct Work {
  int head, batch, q_head;  // batch * query heads + head, and its parts
  int kv_head;              // batch * key heads + key head
  int member;               // whose scales of V
  int block;                // of queries, in the order of q blocks of the pre-pass
  i64 q_row;                // first query, of all heads
  int first, rows;          // first query of the member, and how many there are
  int kv_row, kv_len;       // first row of keys of the head, and how many keys there are
  int bottom, top;          // tiles of keys
  int low, high;            // those from `low` to before `high` are whole by position
};

__device__ __forceinline__ int tiles_below(int keys) { return keys <= 0 ? 0 : keys / BLOCK_N; }
__device__ __forceinline__ int tiles_over(int keys) {
  return keys <= 0 ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
}

__device__ __forceinline__ Work work_of(int t, const Sizes& s, const int* cu_q, const int* cu_kv) {
  Work w;
  if (s.causal_offset != EVERYTHING) {
    // Long rows first; heads in sections whose keys and values stay in the L2 cache.
    const int per_section = s.section * s.m_blocks;
    const int section = t / per_section;
    const int rest = t - section * per_section;
    const int first_head = section * s.section;
    const int heads = min(s.section, s.heads - first_head);
    w.block = s.m_blocks - 1 - rest / heads;
    w.head = first_head + rest % heads;
  } else {
    w.head = t / s.m_blocks;
    w.block = t - w.head * s.m_blocks;
  }
  w.batch = w.head / s.q_heads;
  w.q_head = w.head - w.batch * s.q_heads;
  w.kv_head = w.batch * (s.q_heads / s.group) + w.q_head / s.group;
  w.member = w.batch;
  w.kv_len = s.kv_len;
  w.kv_row = 0;
  int block = w.block, q_start = 0, q_len = s.q_len;
  if (cu_q) {
    // Member i has the blocks from cu_q[i] / BLOCK_M + i on; the last of them may be empty.
    int below = 0, above = s.members - 1;
    while (below < above) {
      const int middle = (below + above + 1) >> 1;
      if (cu_q[middle] / BLOCK_M + middle <= block)
        below = middle;
      else
        above = middle - 1;
    }
    w.member = below;
    q_start = cu_q[below];
    q_len = cu_q[below + 1] - q_start;
    block -= q_start / BLOCK_M + below;
    w.kv_row = (cu_kv[below] / 128 + below) * 128;
    w.kv_len = cu_kv[below + 1] - cu_kv[below];
  }
  w.first = block * BLOCK_M;
  w.rows = max(0, min(BLOCK_M, q_len - w.first));
  w.q_row = (i64)w.head * s.q_len + q_start + w.first;
  const int last = w.first + w.rows - 1;
  w.top = tiles_over(min(w.kv_len, last + s.causal_offset + 1));
  w.high = tiles_below(min(w.kv_len, w.first + s.causal_offset + 1));
  w.bottom = tiles_below(w.first + s.causal_offset - s.window + 1);
  w.low = tiles_over(last + s.causal_offset - s.window + 1);
  if (w.rows == 0) w.top = w.bottom;
  return w;
}

// What a mask leaves of tiles of keys, for one block of queries.
constexpr int DEAD = 0, PARTIAL = 1, WHOLE = 2;

struct States {
  const u32* bits;    // PLACES: bit j of word w is 1 where key 32 w + j is seen
  const u8* entries;  // else a state each tile, made by mma_masks.cu

  __device__ __forceinline__ States(const Work& w, const Sizes& s, const u32* key_bits,
                                    const u8* states) {
    bits = PLACES ? key_bits + (i64)w.batch * (s.kv_pad / 32) : nullptr;
    const i64 entry = (i64)w.batch * s.by_batch + w.q_head * s.by_head + w.block * s.by_block;
    entries = FULL_MASK ? states + entry * tiles_over(s.kv_len) : nullptr;
  }

  __device__ __forceinline__ int of(int tile) const {
    if constexpr (!PLACES) return __ldg(entries + tile);
    u32 some = 0, all = ~0u;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 32; i++) {
      const u32 word = __ldg(bits + tile * (BLOCK_N / 32) + i);
      some |= word;
      all &= word;
    }
    return all == ~0u ? WHOLE : some ? PARTIAL : DEAD;
  }

  // The first tile from `tile` on that is not dead, `top` where there is none. By whole warps.
  __device__ __forceinline__ int next(int tile, int top) const {
    if constexpr (HAS_STATES) {
      for (; tile < top; tile += 32) {
        const int mine = tile + (int)(threadIdx.x & 31);
        const u32 live = __ballot_sync(~0u, mine < top && of(mine) != DEAD);
        if (live) return tile + __ffs(live) - 1;
      }
      return top;
    }
    return tile;
  }
};
