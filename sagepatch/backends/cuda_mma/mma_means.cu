// Scores of the mean of each block of queries, mean_i K'^T of SageAttention2: what smoothing Q took
// from the scores of its queries. A product of matrices in fp32, for each head of K: the rows of A
// are the blocks of queries of all heads that share it.
//
// Macros: K_TYPE (0 fp16, 1 bf16, 2 fp32), HEAD (head size), DP (columns of means), PACKED, VECTORS
// (0: tensors of any strides, as here one number at a time).

#include "ptx.cuh"
#include "rows.cuh"

constexpr int THREADS = 256, ROWS = 64, KEYS = 64, STEP = 16;
constexpr int PAD = 128;  // rows of keys of a packed member begin at multiples

__device__ __forceinline__ float number(const char* at) {
  if constexpr (K_TYPE == FP32) return *(const float*)at;
  const u32 half = *(const unsigned short*)at;
  return K_TYPE == BF16 ? __uint_as_float(half << 16) : from_fp16(half);
}

// means [B, Hkv, rows, DP] times softmax scale and log2(e); k [B, Hkv, kv_len, HEAD] by strides;
// k_mean [members, Hkv, DP]; scores [B, Hkv, rows, kv_pad]. One block of threads makes 64 x 64.
extern "C" __global__ void __launch_bounds__(THREADS) mean_scores(
    const float* means, const void* k, const Strides strides, const float* k_mean,
    const int* cu_kv, float* scores, int rows, int row_tiles, int key_tiles, int heads,
    int members, int kv_len, int kv_pad) {
  __shared__ float a[STEP][ROWS + 4], b[STEP][KEYS + 4];
  const int key_tile = blockIdx.x % key_tiles, rest = blockIdx.x / key_tiles;
  const int row_tile = rest % row_tiles, row_of_heads = rest / row_tiles;
  const int batch = row_of_heads / heads, head = row_of_heads - batch * heads;
  int member = batch, start = 0, first = key_tile * KEYS, length = kv_len;
  if constexpr (PACKED) {
    member = member_of(cu_kv, members, first / PAD, PAD);
    const Span span = span_of(cu_kv, member, kv_len);
    start = span.start;
    length = span.length;
    first -= first_block(cu_kv, member, PAD) * PAD;
  }
  const float* mean = k_mean + ((i64)member * heads + head) * DP;
  const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;  // mine: 4 keys of 4 rows
  float sums[4][4] = {};
  for (int channel = 0; channel < HEAD; channel += STEP) {
    for (int i = threadIdx.x; i < ROWS * STEP; i += THREADS) {
      const int c = i % STEP, r = i / STEP, row = row_tile * ROWS + r;
      a[c][r] = row < rows && channel + c < HEAD
                    ? means[((i64)row_of_heads * rows + row) * DP + channel + c]
                    : 0.f;
      const int key = first + r;
      float value = 0.f;
      if ((u32)key < (u32)length && channel + c < HEAD) {
        const char* at = token_at<K_TYPE>(k, strides, PACKED ? 0 : batch, head, (i64)start + key);
        value = number(at + (channel + c) * strides.channel * SIZE_OF<K_TYPE>) - mean[channel + c];
      }
      b[c][r] = value;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < STEP; c++) {
      const float4 p = *(const float4*)&a[c][y], q = *(const float4*)&b[c][x];
      const float left[4] = {p.x, p.y, p.z, p.w}, right[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += left[i] * right[j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = row_tile * ROWS + y + i;
    if (row < rows)
      *(float4*)(scores + ((i64)row_of_heads * rows + row) * kv_pad + key_tile * KEYS + x) =
          {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
  }
}
