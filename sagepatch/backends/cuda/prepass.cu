// The pre-pass in two launches: `statistics` sums K and takes the largest magnitudes of V over seen
// keys, and quantises Q; `quantise` writes the codes of K and V. prepass.py documents the results.
//
// Bytes, with n_q, n_k, n_v elements of E bytes: `statistics` reads E (n_q + n_k + n_v) and writes
// n_q; `quantise` reads E (n_k + n_v), less what the L2 still holds, and writes n_k + n_v (FP16 PV:
// n_k + 2 n_v). In bf16 and FP8 PV, at the 4.2 TB/s of an H200:
//   B 1, H 24, S  4608, D 128:  99 +  85 MB, floor  44 us (31 us if the L2 held all of K and V)
//   B 2, H 30, S 17776, D  64: 478 + 410 MB, floor 211 us
//
// Macros: Q_TYPE, K_TYPE, V_TYPE (0 fp16, 1 bf16, 2 fp32); HEAD, V_HEAD (head sizes); VECTORS;
// Q_BLOCK (1: one scale a block of 128 queries, 0: one a query); K_GROUPS (keys that share a scale:
// 0 none, 1 all of K_BLOCK, 4 those of a thread of a fragment); K_BLOCK (64 or 128); FP16_PV; MASK
// (0 none, 1 seen bytes, 2 packed); SHIFT (1: write shift_log2; Q is then quantised by `quantise`,
// which knows the mean of K).

#include "rows.cuh"

#include "codes.cuh"

// Tokens of a block; keys are padded to whole blocks.
constexpr int ROWS = 128;
constexpr int DP = round_up(HEAD, 32);
constexpr int D8 = round_up(V_HEAD, 8);
constexpr int THREADS = HEAD > 128 || V_HEAD > 128 ? 512 : 256;
constexpr int WARPS = THREADS / 32;
// Neighbouring threads that read one token, eight channels each, and tokens read at once.
constexpr int QK_LANES = power_of_two(DP / 8), V_LANES = power_of_two(D8 / 8);
constexpr int QK_ROWS = THREADS / QK_LANES, V_ROWS = THREADS / V_LANES;
constexpr int QK_PASSES = ROWS / QK_ROWS;
constexpr bool WIDE = Q_TYPE == FP32 || K_TYPE == FP32 || V_TYPE == FP32;
// Loads of a thread in flight while it takes statistics, and blocks that a multiprocessor holds.
#ifndef UNROLL
#define UNROLL (WIDE ? 4 : 8)
#endif
#ifndef RESIDENT_THREADS
#define RESIDENT_THREADS (WIDE || !VECTORS || (Q_BLOCK && SHIFT) ? 512 : 768)
#endif
constexpr int RESIDENT = RESIDENT_THREADS / THREADS;
constexpr bool SEEN = MASK == 1, PACKED = MASK == 2;

// What both kernels are told. Keys are summed in `chunks` parts of whole blocks: 1 part, or a
// multiple of 4; at most `per_chunk` blocks each. `parts` is those of all heads.
struct Sizes {
  int members, group, q_len, kv_len, kv_pad, per_chunk;
  Divisor q_heads, heads, chunks, q_blocks, kv_blocks, parts;
};

struct Mask {
  const u8* seen;
  i64 batch, token;
  const int* q_offsets;
  const int* kv_offsets;
};

__device__ __forceinline__ int blocks_of(int tokens) { return (tokens + ROWS - 1) / ROWS; }

// The first block of a chunk: chunks differ by one block at most.
__device__ __forceinline__ int chunk_start(int chunk, int blocks, const Sizes& n) {
  return divide(chunk * blocks, n.chunks).quotient;
}

// Where the keys of block number `block` of a head come from. In a packed call `batch` is 0 and
// `group` the member.
struct Keys {
  int batch, group, start, first, length;

  __device__ __forceinline__ Keys(const Mask& mask, const Sizes& n, int item, int block) {
    if constexpr (PACKED) {
      batch = 0;
      group = member_of(mask.kv_offsets, n.members, block, ROWS);
      const Span span = span_of(mask.kv_offsets, group, n.kv_len);
      start = span.start;
      length = span.length;
      first = (block - first_block(mask.kv_offsets, group, ROWS)) * ROWS;
    } else {
      batch = group = item;
      start = 0;
      length = n.kv_len;
      first = block * ROWS;
    }
  }

  // Whether row `row` of the block is a key that somebody sees.
  __device__ __forceinline__ bool has(const Mask& mask, int row) const {
    if constexpr (PACKED) return (u32)(first + row) < (u32)length;
    if (row >= length - first) return false;
    if constexpr (SEEN)
      return mask.seen[batch * mask.batch + (i64)(first + row) * mask.token] != 0;
    return true;
  }
};

// ---- statistics

// One chunk of one head: sums of K and the number of keys, or largest |V|. Channel c of `out` is at
// c * chunks, so that the chunks of a channel are neighbours.
template <int TYPE, int LANES, int CHANNELS, bool SUM>
__device__ void reduce_chunk(const void* data, const Strides& s, const Mask& mask, const Sizes& n,
                             int group, int head, int chunk, float* out, float* count_out,
                             int* last_out, u32* key_bits) {
  constexpr int STEP = THREADS / LANES;
  __shared__ float partial[WARPS][LANES * 8];
  __shared__ int counted, last;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  Span span = {0, n.kv_len};
  if constexpr (PACKED) span = span_of(mask.kv_offsets, group, n.kv_len);
  const int blocks = blocks_of(span.length), batch = PACKED ? 0 : group;
  const int begin = chunk_start(chunk, blocks, n) * ROWS;
  const int limit = chunk_start(chunk + 1, blocks, n) * ROWS, end = min(limit, span.length);
  const char* at = token_at<TYPE>(data, s, batch, head, (i64)span.start + begin + row);
  const i64 step = token_step<TYPE>(s) * STEP;
  const u64 policy = evict_normal();
  float total[8] = {};
  Peaks<TYPE> peaks;
  peaks.most.clear();
  int count = 0, latest = 0;
  if (SEEN && SUM && threadIdx.x == 0) counted = last = 0;
  for (int first = begin + row; first < end; first += UNROLL * STEP) {
    Eight<TYPE> x[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const int key = first + i * STEP;
      bool valid = key < end;
      if constexpr (SEEN) {
        valid = valid && mask.seen[batch * mask.batch + (i64)key * mask.token] != 0;
        if (valid) {
          count++;
          latest = key + 1;
        }
      }
      if (valid)
        load_eight<TYPE>(x[i], at, s.channel, lane * 8, CHANNELS, policy);
      else
        x[i].clear();
      at += step;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      if constexpr (SUM) {
#pragma unroll
        for (int c = 0; c < 8; c++) total[c] += x[i][c];
      } else {
        peaks.add(x[i]);
      }
    }
  }
  if constexpr (!SUM)
#pragma unroll
    for (int c = 0; c < 8; c++) total[c] = peaks.most[c];
  // Fixed order: sums repeat from run to run.
#pragma unroll
  for (int step = LANES; step < 32; step *= 2)
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const float other = __shfl_xor_sync(0xFFFFFFFF, total[c], step);
      total[c] = SUM ? total[c] + other : larger(total[c], other);
    }
  if (threadIdx.x % 32 < LANES)
#pragma unroll
    for (int c = 0; c < 8; c++) partial[threadIdx.x / 32][lane * 8 + c] = total[c];
  __syncthreads();
  if constexpr (SEEN && SUM) {
    if (lane == 0 && count) {
      atomicAdd(&counted, count);
      atomicMax(&last, latest);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      *count_out = counted;
      if (head == 0) *last_out = last;
    }
    // One head writes the bits of its chunk of keys; a chunk is a multiple of a warp's 32 keys.
    if (head == 0) {
      for (int key = begin + threadIdx.x; key < limit; key += THREADS) {
        const bool seen =
            key < n.kv_len && mask.seen[batch * mask.batch + (i64)key * mask.token] != 0;
        const u32 word = __ballot_sync(0xFFFFFFFF, seen);
        if (threadIdx.x % 32 == 0) key_bits[((i64)batch * n.kv_pad + key) / 32] = word;
      }
    }
  }
  constexpr int WIDTH = SUM ? DP : D8;
  for (int c = threadIdx.x; c < WIDTH; c += THREADS) {
    float value = partial[0][c];
    for (int w = 1; w < WARPS; w++)
      value = SUM ? value + partial[w][c] : larger(value, partial[w][c]);
    out[c * n.chunks.by] = value;
  }
}

// ---- codes of Q

// All chunks of a channel, in order.
template <class OP>
__device__ __forceinline__ float over_chunks(const float* at, int chunks) {
  if (chunks == 1) return *at;
  float all = 0.f;
#pragma unroll 2
  for (int chunk = 0; chunk < chunks; chunk += 4) {
    const float4 four = *reinterpret_cast<const float4*>(at + chunk);
    all = OP::of(OP::of(OP::of(OP::of(all, four.x), four.y), four.z), four.w);
  }
  return all;
}

// The mean of K over what the chunks counted, into shared memory; zero from DP on.
__device__ __forceinline__ void mean_of(const float* k_sum, const float* k_count, const Sizes& n,
                                        i64 group_head, int length, float* mean) {
  const int c = threadIdx.x, chunks = n.chunks.by;
  if (c < QK_LANES * 8) mean[c] = 0.f;
  if (c < DP) {
    const float sum = over_chunks<Sum>(k_sum + (group_head * DP + c) * chunks, chunks);
    float count = length;
    if constexpr (SEEN) count = over_chunks<Sum>(k_count + group_head * chunks, chunks);
    mean[c] = __fdiv_rn(sum, fmaxf(count, 1.f));
  }
}

struct QOut {
  signed char* codes;
  float* scale;
  float* shift;
  float factor;
};

__device__ __forceinline__ void quantise_q(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, const QOut& out, int index,
                                           const float* k_sum, const float* k_count) {
  const Divided at_block = divide(index, n.q_blocks);
  const int block = at_block.rest, row_of_heads = at_block.quotient;
  const auto [batch, head] = divide(row_of_heads, n.q_heads);
  int group = batch, first = block * ROWS;
  Span span = {0, n.q_len};
  if constexpr (PACKED) {
    group = member_of(mask.q_offsets, n.members, block, ROWS);
    span = span_of(mask.q_offsets, group, n.q_len);
    first = max(block - first_block(mask.q_offsets, group, ROWS), 0) * ROWS;
  }
  const int lane = threadIdx.x % QK_LANES, row = threadIdx.x / QK_LANES;
  const char* at = token_at<Q_TYPE>(data, s, batch, head, (i64)span.start + first + row);
  const i64 step = token_step<Q_TYPE>(s) * QK_ROWS;
  const u64 policy = evict_first();
  Eight<Q_TYPE> x[QK_PASSES];
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    if (p * QK_ROWS + row < span.length - first)
      load_eight<Q_TYPE>(x[p], at, s.channel, lane * 8, HEAD, policy);
    else
      x[p].clear();
    at += step;
  }
  float mean[8] = {};
  if constexpr (SHIFT) {
    __shared__ float means[QK_LANES * 8];
    wait_for_front();
    int keys = n.kv_len;
    if constexpr (PACKED) keys = span_of(mask.kv_offsets, group, n.kv_len).length;
    mean_of(k_sum, k_count, n, (i64)group * n.heads.by + head / n.group, keys, means);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; c++) mean[c] = means[lane * 8 + c];
  }
  float amax[QK_PASSES], dot[QK_PASSES];
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    amax[p] = peak_of(x[p]);
    dot[p] = 0.f;
    if constexpr (SHIFT)
#pragma unroll
      for (int c = 0; c < 8; c++) dot[p] += x[p][c] * mean[c];
  }
  // This thread's share of the rows' scales is pass `mine`.
  constexpr int SHARE = QK_LANES / QK_PASSES;
  const int mine = lane / SHARE;
  float peak;
  if constexpr (Q_BLOCK) {
    __shared__ float peaks[WARPS];
    peak = amax[0];
#pragma unroll
    for (int p = 1; p < QK_PASSES; p++) peak = larger(peak, amax[p]);
    peak = over_threads<Largest, 32>(peak);
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) peak = larger(peak, peaks[w]);
  } else {
    peak = over_threads<Largest, QK_LANES>(amax);
  }
  const Scaling q = scaling(peak, MOST_INT8);
  // Attention takes maxima of integer products: the sign of the softmax scale goes to the codes.
  const float inverse = out.factor < 0.f ? -q.inverse : q.inverse;
  const int own = first + mine * QK_ROWS + row;
  const i64 start = (i64)row_of_heads * n.q_len + span.start;
  float shift = 0.f;
  if constexpr (SHIFT) shift = over_threads<Sum, QK_LANES>(dot);
  if (lane % SHARE == 0 && own < span.length) {
    out.scale[start + own] = at_most(__fmul_rn(q.scale, fabsf(out.factor)), MOST_Q_SCALE);
    if constexpr (SHIFT) out.shift[start + own] = shift * out.factor;
  }
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    const int token = first + p * QK_ROWS + row;
    const float by =
        Q_BLOCK ? inverse : __shfl_sync(0xFFFFFFFF, inverse, p * SHARE, QK_LANES);
    if (token < span.length && lane * 8 < DP) {
      const uint2 codes = {int8x4(x[p][0], x[p][1], x[p][2], x[p][3], by),
                           int8x4(x[p][4], x[p][5], x[p][6], x[p][7], by)};
      store8(out.codes + (start + token) * DP + lane * 8, codes, policy);
    }
  }
}

// ---- codes of K and V

struct KOut {
  signed char* codes;
  float* scale;
  float* mean;
};

__device__ __forceinline__ void quantise_k(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, const KOut& out, int row_of_heads,
                                           int block, const float* k_sum, const float* k_count) {
  __shared__ float means[QK_LANES * 8];
  __shared__ int peaks[ROWS / 64][4];
  const auto [item, head] = divide(row_of_heads, n.heads);
  const Keys keys(mask, n, item, block);
  const int lane = threadIdx.x % QK_LANES, row = threadIdx.x / QK_LANES;
  const char* at =
      token_at<K_TYPE>(data, s, keys.batch, head, (i64)keys.start + keys.first + row);
  const i64 step = token_step<K_TYPE>(s) * QK_ROWS;
  const u64 policy = evict_first();
  Eight<K_TYPE> x[QK_PASSES];
  u32 valid = 0;
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    if (keys.has(mask, p * QK_ROWS + row)) {
      valid |= 1u << p;
      load_eight<K_TYPE>(x[p], at, s.channel, lane * 8, HEAD, policy);
    } else {
      x[p].clear();
    }
    at += step;
  }
  if (threadIdx.x < ROWS / 16) peaks[threadIdx.x / 4][threadIdx.x % 4] = 0;
  wait_for_front();
  const i64 group_head = (i64)keys.group * n.heads.by + head;
  mean_of(k_sum, k_count, n, group_head, keys.length, means);
  __syncthreads();
  if (keys.first == 0 && threadIdx.x < DP)
    out.mean[group_head * DP + threadIdx.x] = means[threadIdx.x];
  float mean[8];
#pragma unroll
  for (int c = 0; c < 8; c++) mean[c] = means[lane * 8 + c];
  // A thread's rows are a multiple of 8 apart: they fall into one group of each 64 keys.
  const int thread_group = row % 8 / 2;
  constexpr int HALVES = QK_ROWS > 64 ? 1 : 2;
  float amax[QK_PASSES], half[HALVES] = {};
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    amax[p] = 0.f;
    if (valid >> p & 1) {
#pragma unroll
      for (int c = 0; c < 8; c++) amax[p] = larger(amax[p], x[p][c] - mean[c]);
    }
    if constexpr (K_GROUPS != 0) {
      const int h = p * QK_ROWS / 64;
      half[h] = larger(half[h], amax[p]);
    }
  }
  const i64 first_row = (i64)row_of_heads * n.kv_pad + block * ROWS;
  constexpr int SHARE = QK_LANES / QK_PASSES;
  float inverse[HALVES];
  if constexpr (K_GROUPS == 0) {
    const Scaling k = scaling(over_threads<Largest, QK_LANES>(amax), MOST_INT8);
    if (lane % SHARE == 0)
      out.scale[first_row + lane / SHARE * QK_ROWS + row] = at_most(k.scale, MOST_K_SCALE);
    inverse[0] = k.inverse;
  } else {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      half[h] = over_threads<Largest, QK_LANES>(half[h]);
      const int of = QK_ROWS > 64 ? row / 64 : h;
      if (lane == 0) atomicMax(&peaks[of][thread_group], __float_as_int(half[h]));
    }
    __syncthreads();
    const auto peak = [&](int of, int group) {
      if constexpr (K_GROUPS == 4) return __int_as_float(peaks[of][group]);
      int all = 0;
#pragma unroll
      for (int i = 0; i < ROWS / 16; i++)
        if (K_BLOCK == 128 || i / 4 == of) all = max(all, peaks[i / 4][i % 4]);
      return __int_as_float(all);
    };
    if (threadIdx.x < ROWS / 16) {
      const float scale = scaling(peak(threadIdx.x / 4, threadIdx.x % 4), MOST_INT8).scale;
      out.scale[first_row / 16 + threadIdx.x] = at_most(scale, MOST_K_SCALE);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      inverse[h] = scaling(peak(QK_ROWS > 64 ? row / 64 : h, thread_group), MOST_INT8).inverse;
  }
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    const int r = p * QK_ROWS + row;
    const float by = K_GROUPS == 0
                         ? __shfl_sync(0xFFFFFFFF, inverse[0], p * SHARE, QK_LANES)
                         : inverse[HALVES == 1 ? 0 : p * QK_ROWS / 64];
    uint2 codes = {0, 0};
    if (valid >> p & 1) {
      codes.x = int8x4(x[p][0] - mean[0], x[p][1] - mean[1], x[p][2] - mean[2], x[p][3] - mean[3],
                       by);
      codes.y = int8x4(x[p][4] - mean[4], x[p][5] - mean[5], x[p][6] - mean[6], x[p][7] - mean[7],
                       by);
    }
    if (lane * 8 < DP) *(uint2*)(out.codes + (first_row + r) * DP + lane * 8) = codes;
  }
}

struct VOut {
  void* codes;
  float* scale;
  float range;
};

// [ROWS, V_HEAD] to [D8, ROWS] in E4M3, keys in the order of the operand P; or to FP16 in place.
__device__ __forceinline__ void quantise_v(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, const VOut& out, int row_of_heads,
                                           int block, const float* v_peak) {
  constexpr int WORDS = ROWS / 4;
  constexpr int PASSES = V_ROWS > WORDS ? 1 : WORDS / V_ROWS;
  __shared__ float inverses[V_LANES * 8];
  const auto [item, head] = divide(row_of_heads, n.heads);
  const Keys keys(mask, n, item, block);
  const int lane = threadIdx.x % V_LANES, row = threadIdx.x / V_LANES;
  // Word w of 128 keys holds keys 2t, 2t + 1, 2t + 8, 2t + 9 of its 16, t = w mod 4. This thread
  // makes words row, row + V_ROWS, and so on.
  const int first_key = row / 4 * 16 + row % 4 * 2;
  const auto key_of = [&](int p, int j) { return first_key + p * V_ROWS * 4 + j % 2 + j / 2 * 8; };
  const char* at = token_at<V_TYPE>(data, s, keys.batch, head,
                                    (i64)keys.start + keys.first + first_key);
  const i64 step = token_step<V_TYPE>(s);
  const u64 policy = evict_first();
  Eight<V_TYPE> x[PASSES][4];
#pragma unroll
  for (int p = 0; p < PASSES; p++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (p * V_ROWS + row < WORDS && keys.has(mask, key_of(p, j)))
        load_eight<V_TYPE>(x[p][j], at + (p * V_ROWS * 4 + j % 2 + j / 2 * 8) * step, s.channel,
                           lane * 8, V_HEAD, policy);
      else
        x[p][j].clear();
    }
  wait_for_front();
  const i64 group_head = (i64)keys.group * n.heads.by + head;
  if (threadIdx.x < V_LANES * 8) {
    float amax = 0.f;
    const int chunks = n.chunks.by;
    if (threadIdx.x < D8)
      amax = over_chunks<Largest>(v_peak + (group_head * D8 + threadIdx.x) * chunks, chunks);
    const Scaling v = FP16_PV ? power_scaling(amax, out.range) : scaling(amax, out.range);
    inverses[threadIdx.x] = v.inverse;
    if (keys.first == 0 && threadIdx.x < D8)
      out.scale[group_head * D8 + threadIdx.x] = threadIdx.x < V_HEAD ? v.scale : 0.f;
  }
  __syncthreads();
  float inverse[8];
#pragma unroll
  for (int c = 0; c < 8; c++) inverse[c] = inverses[lane * 8 + c];
  if constexpr (FP16_PV) {
    const i64 first_row = (i64)row_of_heads * n.kv_pad + block * ROWS;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int w = p * V_ROWS + row;
        const Eight<V_TYPE>& y = x[p][j];
        const auto two = [&](int c) {
          return fp16x2(__fmul_rn(y[c], inverse[c]), __fmul_rn(y[c + 1], inverse[c + 1]));
        };
        if (w < WORDS && lane * 8 < D8)
          *(uint4*)((unsigned short*)out.codes + (first_row + key_of(p, j)) * D8 + lane * 8) =
              make_uint4(two(0), two(2), two(4), two(6));
      }
  } else {
    // Exclusive or spreads the words of a warp over all banks, both when written and when read.
    constexpr int SPREAD = 32 / V_LANES;
    __shared__ uint4 tile[V_LANES * 8][WORDS / 4];
    u32* words = (u32*)tile;
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const int w = p * V_ROWS + row;
      if (w < WORDS)
#pragma unroll
        for (int c = 0; c < 8; c++)
          words[(lane * 8 + c) * WORDS + (w ^ (lane * SPREAD))] =
              e4m3x4(__fmul_rn(x[p][0][c], inverse[c]), __fmul_rn(x[p][1][c], inverse[c]),
                     __fmul_rn(x[p][2][c], inverse[c]), __fmul_rn(x[p][3][c], inverse[c]));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < D8 * (WORDS / 4); i += THREADS) {
      const int channel = i / (WORDS / 4), quad = i % (WORDS / 4);
      const int spread = channel / 8 * SPREAD;
      uint4 four = tile[channel][quad ^ (spread / 4)];
      if (spread & 1) four = make_uint4(four.y, four.x, four.w, four.z);
      if (spread & 2) four = make_uint4(four.z, four.w, four.x, four.y);
      *(uint4*)((u8*)out.codes + ((i64)row_of_heads * D8 + channel) * n.kv_pad + block * ROWS +
                quad * 16) = four;
    }
  }
}

// ---- the two kernels

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    statistics(const void* q, const void* k, const void* v, const Strides q_strides,
               const Strides k_strides, const Strides v_strides, const Mask mask, const Sizes n,
               const QOut q_out, float* k_sum, float* k_count, int* last_seen, float* v_peak,
               u32* key_bits, int* counters) {
  let_next_begin();
  if (blockIdx.x == 0 && threadIdx.x < 4) counters[threadIdx.x] = 0;
  const int parts = n.parts.by, index = blockIdx.x;
  if (index < 2 * parts) {
    const auto [row, chunk] = divide(index / 2, n.chunks);
    const auto [group, head] = divide(row, n.heads);
    const i64 row_at = (i64)row * n.chunks.by;
    if (index % 2)
      reduce_chunk<V_TYPE, V_LANES, V_HEAD, false>(v, v_strides, mask, n, group, head, chunk,
                                                   v_peak + row_at * D8 + chunk, nullptr, nullptr,
                                                   nullptr);
    else
      reduce_chunk<K_TYPE, QK_LANES, HEAD, true>(
          k, k_strides, mask, n, group, head, chunk, k_sum + row_at * DP + chunk,
          k_count + row_at + chunk, last_seen + group * n.chunks.by + chunk, key_bits);
  } else if constexpr (!SHIFT) {
    quantise_q(q, q_strides, mask, n, q_out, index - 2 * parts, nullptr, nullptr);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantise(const void* q, const void* k, const void* v, const Strides q_strides,
             const Strides k_strides, const Strides v_strides, const Mask mask, const Sizes n,
             const QOut q_out, const KOut k_out, const VOut v_out, const float* k_sum,
             const float* k_count, const int* last_seen, const float* v_peak, int* seen_len,
             int rows) {
  let_next_begin();
  // Units of one block of K or V. What `statistics` read last comes first: the L2 still has it.
  const int units = PACKED ? rows * n.kv_blocks.by : n.parts.by * n.per_chunk;
  const int index = blockIdx.x;
  if (index < 2 * units) {
    int row_of_heads, block;
    if constexpr (PACKED) {
      const Divided unit = divide(index / 2, n.kv_blocks);
      row_of_heads = unit.quotient;
      block = unit.rest;
    } else {
      const auto [position, part] = divide(index / 2, n.parts);
      const Divided of = divide(part, n.chunks);
      row_of_heads = of.quotient;
      block = chunk_start(of.rest + 1, n.kv_blocks.by, n) - 1 - position;
      if (block < chunk_start(of.rest, n.kv_blocks.by, n)) return;
    }
    if (index % 2) {
      quantise_v(v, v_strides, mask, n, v_out, row_of_heads, block, v_peak);
    } else {
      quantise_k(k, k_strides, mask, n, k_out, row_of_heads, block, k_sum, k_count);
      if constexpr (SEEN) {
        const auto [item, head] = divide(row_of_heads, n.heads);
        if (block == 0 && head == 0 && threadIdx.x == 0) {
          int length = 0;
          for (int chunk = 0; chunk < n.chunks.by; chunk++)
            length = max(length, last_seen[item * n.chunks.by + chunk]);
          seen_len[item] = length;
        }
      }
    }
  } else if constexpr (SHIFT) {
    quantise_q(q, q_strides, mask, n, q_out, index - 2 * units, k_sum, k_count);
  }
}
