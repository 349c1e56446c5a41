// Codes and scales of a block of queries, keys or values.

constexpr float MOST_QK = QK_BITS == 4 ? MOST_INT4 : MOST_INT8;

// Codes of eight channels of a token of Q or K.
__device__ __forceinline__ void store_codes(signed char* codes, i64 token, int lane,
                                            const float (&x)[8], float inverse, u64 policy) {
  if constexpr (QK_BITS == 4) {
    *(u32*)(codes + token * (DP / 2) + lane * 4) = int4x8(x, inverse);
  } else {
    const uint2 eight = {int8x4(x[0], x[1], x[2], x[3], inverse),
                         int8x4(x[4], x[5], x[6], x[7], inverse)};
    store8(codes + token * DP + lane * 8, eight, policy);
  }
}

struct QOut {
  signed char* codes;
  float* scale;
  float* shift;
  float factor;
#if SMOOTH_Q
  float* mean;  // [B, Hq, q_blocks, DP], times `factor`
#endif
};

// The mean of `count` queries of a block, eight channels a thread; absent ones are zeros in x.
template <int N>
__device__ __forceinline__ void mean_of_block(float (&mean)[8], const Eight<Q_TYPE> (&x)[N],
                                              int lane, int count) {
  auto& partial = *reinterpret_cast<float(*)[WARPS][QK_LANES * 8]>(room);
#pragma unroll
  for (int p = 0; p < N; p++)
#pragma unroll
    for (int c = 0; c < 8; c++) mean[c] += x[p][c];
#pragma unroll
  for (int other = QK_LANES; other < 32; other *= 2)
#pragma unroll
    for (int c = 0; c < 8; c++) mean[c] += __shfl_xor_sync(0xFFFFFFFF, mean[c], other);
  if (threadIdx.x % 32 < QK_LANES)
#pragma unroll
    for (int c = 0; c < 8; c++) partial[threadIdx.x / 32][lane * 8 + c] = mean[c];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 8; c++) {
    float sum = 0.f;
    for (int w = 0; w < WARPS; w++) sum += partial[w][lane * 8 + c];
    mean[c] = __fdiv_rn(sum, (float)max(count, 1));
  }
}

__device__ __forceinline__ void quantise_q(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, const QOut& out, int index,
                                           const Statistics& known) {
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
    const i64 group_head = (i64)group * n.heads.by + head / n.group;
    wait_until_ready(&known.progress[group_head].ready[0]);
    read_eight(mean, known.k_mean + group_head * DP, lane * 8, DP);
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
  float centre[8] = {};
  if constexpr (SMOOTH_Q) {
    mean_of_block(centre, x, lane, min(ROWS, span.length - first));
#pragma unroll
    for (int p = 0; p < QK_PASSES; p++) {
      amax[p] = 0.f;
      if (p * QK_ROWS + row < span.length - first)
#pragma unroll
        for (int c = 0; c < 8; c++) amax[p] = larger(amax[p], x[p][c] - centre[c]);
    }
#if SMOOTH_Q
    if (row == 0 && lane * 8 < DP)
#pragma unroll
      for (int c = 0; c < 8; c++)
        out.mean[((i64)row_of_heads * n.q_blocks.by + block) * DP + lane * 8 + c] =
            centre[c] * out.factor;
#endif
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
  const Scaling q = scaling(peak, MOST_QK);
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
      float y[8];
#pragma unroll
      for (int c = 0; c < 8; c++) y[c] = SMOOTH_Q ? x[p][c] - centre[c] : x[p][c];
      store_codes(out.codes, start + token, lane, y, by, policy);
    }
  }
}

struct KOut {
  signed char* codes;
  float* scale;
};

__device__ __forceinline__ void quantise_k(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, const KOut& out, int batch, int head,
                                           int block, const Statistics& known) {
  __shared__ int peaks[ROWS / 64][4];
  const Keys keys(mask, n, batch, block);
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
  const i64 group_head = (i64)keys.group * n.heads.by + head;
  wait_until_ready(&known.progress[group_head].ready[0]);
  float mean[8];
  read_eight(mean, known.k_mean + group_head * DP, lane * 8, DP);
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
  const i64 first_row = ((i64)batch * n.heads.by + head) * n.kv_pad + block * ROWS;
  constexpr int SHARE = QK_LANES / QK_PASSES;
  float inverse[HALVES], power[HALVES] = {};
  if constexpr (K_GROUPS == 0) {
    const Scaling k = scaling(over_threads<Largest, QK_LANES>(amax), MOST_QK);
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
      const float scale = scaling(peak(threadIdx.x / 4, threadIdx.x % 4), MOST_QK).scale;
      out.scale[first_row / 16 + threadIdx.x] = at_most(scale, MOST_K_SCALE);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const Scaling of = scaling(peak(QK_ROWS > 64 ? row / 64 : h, thread_group), MOST_QK);
      inverse[h] = of.inverse;
      power[h] = at_most(of.scale, MOST_K_SCALE) * at_most(of.scale, MOST_K_SCALE);
    }
  }
  float norms[QK_PASSES];
#pragma unroll
  for (int p = 0; p < QK_PASSES; p++) {
    const int r = p * QK_ROWS + row;
    const float by = K_GROUPS == 0
                         ? __shfl_sync(0xFFFFFFFF, inverse[0], p * SHARE, QK_LANES)
                         : inverse[HALVES == 1 ? 0 : p * QK_ROWS / 64];
    if constexpr (QK_BITS == 4) {
      float y[8];
#pragma unroll
      for (int c = 0; c < 8; c++) y[c] = valid >> p & 1 ? x[p][c] - mean[c] : 0.f;
      if (lane * 8 < DP) store_codes(out.codes, first_row + r, lane, y, by, policy);
      continue;
    }
    uint2 codes = {0, 0};
    if (valid >> p & 1) {
      codes.x = int8x4(x[p][0] - mean[0], x[p][1] - mean[1], x[p][2] - mean[2], x[p][3] - mean[3],
                       by);
      codes.y = int8x4(x[p][4] - mean[4], x[p][5] - mean[5], x[p][6] - mean[6], x[p][7] - mean[7],
                       by);
    }
    if (lane * 8 < DP) *(uint2*)(out.codes + (first_row + r) * DP + lane * 8) = codes;
    norms[p] = K_NORM ? (float)(squares(codes.x) + squares(codes.y)) * power[HALVES == 1 ? 0 : p * QK_ROWS / 64] : 0.f;
  }
  if constexpr (K_NORM) {
    float most = over_threads<Largest, 32>(over_threads<Sum, QK_LANES>(norms));
    if (threadIdx.x % 32 == 0)
      atomicMax(&known.k_norm[group_head], __float_as_int(most));
  }
}

// [ROWS, V_HEAD] to [D8, ROWS] in E4M3 or INT8, keys in the order of the operand P; or to FP16 or
// BF16 in place.
__device__ __forceinline__ void quantise_v(const void* data, const Strides& s, const Mask& mask,
                                           const Sizes& n, void* out, int batch, int head,
                                           int block, const Statistics& known) {
  constexpr int WORDS = ROWS / 4;
  constexpr int PASSES = V_ROWS > WORDS ? 1 : WORDS / V_ROWS;
  const Keys keys(mask, n, batch, block);
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
  const i64 group_head = (i64)keys.group * n.heads.by + head;
  wait_until_ready(&known.progress[group_head].ready[1]);
  float inverse[8];
  read_eight(inverse, known.v_inverse + group_head * D8, lane * 8, D8);
  const i64 row_of_heads = (i64)batch * n.heads.by + head;
  if constexpr (HALF_PV) {
    const i64 first_row = row_of_heads * n.kv_pad + block * ROWS;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int w = p * V_ROWS + row;
        const Eight<V_TYPE>& y = x[p][j];
        const auto two = [&](int c) {
          const float a = __fmul_rn(y[c], inverse[c]), b = __fmul_rn(y[c + 1], inverse[c + 1]);
          return BF16_PV ? bf16x2(a, b) : fp16x2(a, b);
        };
        if (w < WORDS && lane * 8 < D8)
          *(uint4*)((unsigned short*)out + (first_row + key_of(p, j)) * D8 + lane * 8) =
              make_uint4(two(0), two(2), two(4), two(6));
      }
  } else {
    // Exclusive or spreads the words of a warp over all banks, both when written and when read.
    constexpr int SPREAD = 32 / V_LANES;
    auto& tile = *reinterpret_cast<uint4(*)[V_LANES * 8][WORDS / 4]>(room);
    u32* words = reinterpret_cast<u32*>(room);
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const int w = p * V_ROWS + row;
      if (w < WORDS)
#pragma unroll
        for (int c = 0; c < 8; c++)
          words[(lane * 8 + c) * WORDS + (w ^ (lane * SPREAD))] =
              INT8_PV
                  ? int8x4(x[p][0][c], x[p][1][c], x[p][2][c], x[p][3][c], inverse[c])
                  : e4m3x4(__fmul_rn(x[p][0][c], inverse[c]), __fmul_rn(x[p][1][c], inverse[c]),
                           __fmul_rn(x[p][2][c], inverse[c]), __fmul_rn(x[p][3][c], inverse[c]));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < D8 * (WORDS / 4); i += THREADS) {
      const int channel = i / (WORDS / 4), quad = i % (WORDS / 4);
      const int spread = channel / 8 * SPREAD;
      uint4 four = tile[channel][quad ^ (spread / 4)];
      if (spread & 1) four = make_uint4(four.y, four.x, four.w, four.z);
      if (spread & 2) four = make_uint4(four.z, four.w, four.x, four.y);
      *(uint4*)((u8*)out + (row_of_heads * D8 + channel) * n.kv_pad + block * ROWS +
                quad * 16) = four;
    }
  }
}
