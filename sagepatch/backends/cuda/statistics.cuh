// What the codes of K and V need to know of a whole head: the mean of K and the largest |V| of each
// channel, over keys that somebody sees. Chunks of a head are reduced by blocks of their own; the
// last of them to arrive puts the chunks together, in order, so that sums repeat from run to run.

// Of a head of a batch member or packed member: chunks that have arrived, and whether the result is
// there, for K and V.
struct Progress {
  int arrived[2], ready[2];
};

struct Statistics {
  float* k_sum;      // [groups, heads, chunks, DP]
  int* k_count;      // [groups, heads, chunks]
  int* last_seen;    // [groups, chunks]
  float* v_peak;     // [groups, heads, chunks, D8]
  float* k_mean;     // [groups, heads, DP]
  float* v_scale;    // [groups, heads, D8]
  float* v_inverse;  // [groups, heads, D8]
  Progress* progress;
  int* k_norm;       // [groups, heads] with K_NORM, zeros: largest |codes|^2 scale^2 of a key, as bits
  u32* key_bits;
  int* kv_len;
  float v_range;
};

// Waits until the statistics of a head are there. They come from blocks with lower numbers, which
// have begun before this one and wait for nobody.
__device__ __forceinline__ void wait_until_ready(const int* ready) {
  if (threadIdx.x == 0) {
    wait_for_front();
    while (!read_acquire(ready)) __nanosleep(100);
  }
  __syncthreads();
}

// Eight channels of a row of numbers that is `width` long, a multiple of 8; zeros behind it.
__device__ __forceinline__ void read_eight(float (&x)[8], const float* row, int first, int width) {
  float4 low = {0.f, 0.f, 0.f, 0.f}, high = low;
  if (first < width) {
    low = *reinterpret_cast<const float4*>(row + first);
    high = *reinterpret_cast<const float4*>(row + first + 4);
  }
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// One chunk of one head: sums of K and the number of keys, or largest |V|.
template <int TYPE, int LANES, int CHANNELS, bool KEYS>
__device__ void reduce_chunk(const void* data, const Strides& s, const Mask& mask, const Sizes& n,
                             const Statistics& out, int group, int head, int chunk) {
  constexpr int STEP = THREADS / LANES, WIDTH = KEYS ? DP : D8;
  using OP = typename Either<KEYS, Sum, Largest>::type;
  auto& partial = *reinterpret_cast<float(*)[WARPS][LANES * 8]>(room);
  __shared__ int counted, last, arrived;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, chunks = n.chunks.by;
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
  if (SEEN && KEYS && threadIdx.x == 0) counted = last = 0;
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
      if constexpr (KEYS) {
#pragma unroll
        for (int c = 0; c < 8; c++) total[c] += x[i][c];
      } else {
        peaks.add(x[i]);
      }
    }
  }
  if constexpr (!KEYS)
#pragma unroll
    for (int c = 0; c < 8; c++) total[c] = peaks.most[c];
#pragma unroll
  for (int other = LANES; other < 32; other *= 2)
#pragma unroll
    for (int c = 0; c < 8; c++)
      total[c] = OP::of(total[c], __shfl_xor_sync(0xFFFFFFFF, total[c], other));
  if (threadIdx.x % 32 < LANES)
#pragma unroll
    for (int c = 0; c < 8; c++) partial[threadIdx.x / 32][lane * 8 + c] = total[c];
  __syncthreads();
  const i64 group_head = (i64)group * n.heads.by + head;
  float* parts = (KEYS ? out.k_sum : out.v_peak) + group_head * chunks * WIDTH;
  if constexpr (SEEN && KEYS) {
    if (lane == 0 && count) {
      atomicAdd(&counted, count);
      atomicMax(&last, latest);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      out.k_count[group_head * chunks + chunk] = counted;
      if (head == 0) out.last_seen[(i64)group * chunks + chunk] = last;
    }
    // One head writes the bits of its chunk of keys; a chunk is a multiple of a warp's 32 keys.
    if (head == 0) {
      for (int key = begin + threadIdx.x; key < limit; key += THREADS) {
        const bool seen =
            key < n.kv_len && mask.seen[batch * mask.batch + (i64)key * mask.token] != 0;
        const u32 word = __ballot_sync(0xFFFFFFFF, seen);
        if (threadIdx.x % 32 == 0) out.key_bits[((i64)batch * n.kv_pad + key) / 32] = word;
      }
    }
  }
  for (int c = threadIdx.x; c < WIDTH; c += THREADS) {
    float value = partial[0][c];
#pragma unroll
    for (int w = 1; w < WARPS; w++) value = OP::of(value, partial[w][c]);
    parts[(i64)chunk * WIDTH + c] = value;
  }
  __syncthreads();
  Progress& progress = out.progress[group_head];
  if (threadIdx.x == 0) {
    wait_for_front();  // it sets the progress to zero
    __threadfence();
    arrived = atomicAdd(&progress.arrived[KEYS ? 0 : 1], 1);
    __threadfence();
  }
  __syncthreads();
  if (arrived != chunks - 1) return;
  // The last one: the chunks of a channel go to several threads, these together in order.
  constexpr int TEAMS = min_of(THREADS / (LANES * 8), WARPS);
  const int c = threadIdx.x % (LANES * 8), team = threadIdx.x / (LANES * 8);
  if (team < TEAMS) {
    float value = 0.f;
    if (c < WIDTH) {
#pragma unroll 8
      for (int i = team; i < chunks; i += TEAMS)
        value = OP::of(value, __ldcg(parts + (i64)i * WIDTH + c));
    }
    partial[team][c] = value;
  }
  __syncthreads();
  if (team == 0 && c < WIDTH) {
    float value = partial[0][c];
#pragma unroll
    for (int t = 1; t < TEAMS; t++) value = OP::of(value, partial[t][c]);
    if constexpr (KEYS) {
      int keys = span.length;
      if constexpr (SEEN) {
        keys = 0;
        for (int i = 0; i < chunks; i++) keys += __ldcg(out.k_count + group_head * chunks + i);
      }
      out.k_mean[group_head * WIDTH + c] = __fdiv_rn(value, (float)max(keys, 1));
    } else {
      const Scaling v = HALF_PV ? power_scaling(value, out.v_range) : scaling(value, out.v_range);
      out.v_scale[group_head * WIDTH + c] = c < V_HEAD ? v.scale : 0.f;
      out.v_inverse[group_head * WIDTH + c] = v.inverse;
    }
  }
  if constexpr (SEEN && KEYS) {
    if (head == 0 && threadIdx.x == 0) {
      int length = 0;
      for (int i = 0; i < chunks; i++)
        length = max(length, __ldcg(out.last_seen + (i64)group * chunks + i));
      out.kv_len[group] = length;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    write_release(&progress.ready[KEYS ? 0 : 1], 1);
  }
}
