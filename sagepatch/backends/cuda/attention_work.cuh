// Which rows and keys a block of queries has: order of blocks, causal and window bounds, members of
// packed calls. Needs attention_sizes.cuh; knows no scores.

// A key mask without positions: tiles come from a list, which leaves out those that nobody sees.
constexpr bool TILE_LIST = KEY_MASK && !CAUSAL;

struct Sizes {
  int heads, q_heads, group;  // batch * query heads; query heads; of them a key head
  int q_len, kv_len;          // totals in a packed call
  int m_blocks, whole;        // blocks of queries: of a head; of all heads, less those dealt out
  int section;                // causal: heads that run together
  int causal_offset, window, members;
  // SPLIT: tiles of a block; dealt to everybody; one more to so many; turns with them.
  int tiles, share, share_rest, pieces;
};

struct Work {
  int head, kv_head;    // batch * heads + head, the third axis of the tensor maps
  int q_row, q_rows;    // first query row in its tensor, and how many rows there are
  int kv_row, kv_len;   // first key row in its tensor, and how many keys there are
  int batch, member;    // out and scales
  int first;            // first query row inside the member
  int bottom, count;    // tiles bottom, bottom + 1, .. (or of the list), `count` of them
  int low, whole;       // those from `low` to `whole` hide nothing
};

// Floor and ceiling of a / BLOCK_N for a >= 0, 0 below.
static __device__ __forceinline__ int tiles_below(int a) { return a <= 0 ? 0 : a / BLOCK_N; }
static __device__ __forceinline__ int tiles_over(int a) {
  return a <= 0 ? 0 : (a + BLOCK_N - 1) / BLOCK_N;
}

static __device__ __forceinline__ Work work_of(int t, const Sizes& s, const int* cu_q,
                                               const int* cu_kv, const int* tile_counts) {
  Work w;
  int m_block;
  if constexpr (CAUSAL) {
    // Long rows first; heads in sections whose keys and values stay in the L2 cache.
    int per_section = s.section * s.m_blocks;
    int section = t / per_section;
    int rest = t - section * per_section;
    int first_head = section * s.section;
    int heads = min(s.section, s.heads - first_head);
    m_block = s.m_blocks - 1 - rest / heads;
    w.head = first_head + rest % heads;
  } else {
    w.head = t / s.m_blocks;
    m_block = t - w.head * s.m_blocks;
  }
  w.batch = w.head / s.q_heads;
  int q_head = w.head - w.batch * s.q_heads;
  w.kv_head = w.batch * (s.q_heads / s.group) + q_head / s.group;
  int q_len = s.q_len;
  w.kv_len = s.kv_len;
  w.kv_row = 0;
  w.member = w.batch;
  int q_start = 0;
  if constexpr (PACKED) {
    // Member i has the blocks from cu_q[i] / BLOCK_M + i on; the last of them may be empty.
    int low = 0, high = s.members - 1;
    while (low < high) {
      int middle = (low + high + 1) >> 1;
      if (cu_q[middle] / BLOCK_M + middle <= m_block) low = middle;
      else high = middle - 1;
    }
    q_start = cu_q[low];
    q_len = cu_q[low + 1] - q_start;
    m_block -= q_start / BLOCK_M + low;
    w.member = low;
    w.kv_row = (cu_kv[low] / 128 + low) * 128;
    w.kv_len = cu_kv[low + 1] - cu_kv[low];
  }
  w.first = m_block * BLOCK_M;
  w.q_row = q_start + w.first;
  w.q_rows = max(0, min(BLOCK_M, q_len - w.first));
  int last = w.first + w.q_rows - 1;
  int top = tiles_over(w.kv_len);
  int whole_below = w.kv_len / BLOCK_N;  // tiles under this one end before the keys do
  w.bottom = w.low = 0;
  if constexpr (CAUSAL) {
    top = min(top, tiles_over(last + s.causal_offset + 1));
    whole_below = min(whole_below, tiles_below(w.first + s.causal_offset + 1));
  }
  if constexpr (WINDOW) w.bottom = tiles_below(w.first + s.causal_offset - s.window + 1);
  w.count = w.q_rows == 0 ? 0 : max(0, top - w.bottom);
  if constexpr (WINDOW)
    w.low = max(0, min(w.count, tiles_over(last + s.causal_offset - s.window + 1) - w.bottom));
  w.whole = max(w.low, min(w.count, whole_below - w.bottom));
  if constexpr (TILE_LIST) {
    w.whole = tile_counts[w.batch * 2];
    w.count = w.whole + tile_counts[w.batch * 2 + 1];
  } else if constexpr (KEY_MASK) {
    w.low = w.whole = 0;
  }
  return w;
}

// The i-th tile; a list has whole ones in front, and partial ones at its end, backwards.
static __device__ __forceinline__ int tile_at(const Work& w, int i, const int* list, int tiles) {
  if constexpr (!TILE_LIST) return w.bottom + i;
  return __ldg(list + w.batch * tiles + (i < w.whole ? i : tiles - 1 - (i - w.whole)));
}

// Under a causal mask a warpgroup that takes no turns skips the tiles that lie behind all of its own
// rows, and looks at positions in those only that its own rows cross.
constexpr bool OWN_TILES = CAUSAL && !PINGPONG;

static __device__ __forceinline__ void own_tiles(Work& w, const Sizes& s, int consumer) {
  const int past = w.first + consumer * 64 + s.causal_offset + 1;  // keys of its first row
  w.count = max(1, min(w.count, tiles_over(past + 63) - w.bottom));
  w.low = min(w.low, w.count);
  if constexpr (!KEY_MASK)
    w.whole = max(w.low, min(w.count, min(w.kv_len / BLOCK_N, tiles_below(past)) - w.bottom));
}

// A part of a block of queries: tiles `from` to `to` of it; `to` is open where all are meant.
struct Share {
  int t, from, to;
};
constexpr int ALL = 0x7FFFFFFF;

// What a block of threads has to do in one turn after another: blocks of queries t = blockIdx.x,
// blockIdx.x + gridDim.x, .. below `whole`, and with SPLIT its part of the last ones, which would
// leave most of the GPU idle. These are dealt out by tiles: everybody gets as many (or one more),
// beginning inside one block of queries and ending inside another. All have `tiles`, and nobody has
// more than `pieces` turns with them; a turn may be empty.
struct Dealt {
  int block, from, left;  // the next one, its first tile, tiles to take in all

  __device__ __forceinline__ explicit Dealt(const Sizes& s) : block(0), from(0), left(0) {
    if constexpr (SPLIT) {
      const int begin = begin_of(s, blockIdx.x);
      left = begin_of(s, blockIdx.x + 1) - begin;
      block = begin / s.tiles;
      from = begin - block * s.tiles;
    }
  }

  // The first tile that block of threads `b` gets of those dealt out.
  static __device__ __forceinline__ int begin_of(const Sizes& s, int b) {
    return SPLIT ? b * s.share + min(b, s.share_rest) : 0;
  }

  // Turn t.
  __device__ __forceinline__ Share take(const Sizes& s, int t) {
    if (!SPLIT || t < s.whole) return {t, 0, ALL};
    const int to = min(s.tiles, from + left);
    const Share share = {s.whole + block, from, to};
    left -= to - from;
    block++;
    from = 0;
    return share;
  }
};

static __device__ __forceinline__ void restrict_to(Work& w, const Share& share) {
  if constexpr (SPLIT) {
    w.whole = max(0, min(w.whole, share.to) - share.from);
    w.count = min(w.count, share.to) - share.from;
    w.bottom = share.from;
  }
}
