// What a mask leaves of each tile of BLOCK_M queries and BLOCK_N keys (a state: 0 nothing, 1 some, 2
// all, unchanged), and which keys somebody sees: one block of threads a tile. Knows no attention.
//
// Macros: BLOCK_M, BLOCK_N, ADDITIVE, MASK_TYPE (0 fp16, 1 bf16, 2 fp32; bool is bytes).

#include "ptx.cuh"

constexpr int THREADS = 256;

// Whether the mask lets a score through, and whether as it is.
struct Leaves {
  bool some, all;
};

__device__ __forceinline__ Leaves leaves(const void* mask, i64 at) {
  if constexpr (!ADDITIVE) {
    const bool keep = ((const u8*)mask)[at] != 0;
    return {keep, keep};
  } else {
    u32 bits;
    if constexpr (MASK_TYPE == FP32)
      bits = ((const u32*)mask)[at];
    else
      bits = ((const unsigned short*)mask)[at];
    constexpr u32 lowest = MASK_TYPE == FP32 ? 0xFF800000 : MASK_TYPE == BF16 ? 0xFF80 : 0xFC00;
    constexpr u32 sign = MASK_TYPE == FP32 ? 0x80000000 : 0x8000;
    return {bits != lowest, (bits & ~sign) == 0};
  }
}

// mask [.., .., queries, keys] by strides of elements; states [blocks, tiles], blocks are batch *
// heads * q_blocks of the mask's own; seen [batch, keys], zeros, gets 1 where a query sees the key.
extern "C" __global__ void __launch_bounds__(THREADS) mask_states(
    const void* mask, u8* states, u8* seen, i64 batch_step, i64 head_step, i64 row_step,
    i64 key_step, int heads, int q_blocks, int tiles, int queries, int keys) {
  const int entry = blockIdx.x / tiles, tile = blockIdx.x - entry * tiles;
  const int q_block = entry % q_blocks, head = entry / q_blocks % heads;
  const int batch = entry / q_blocks / heads;
  const i64 from = batch * batch_step + head * head_step;
  const int key = tile * BLOCK_N + threadIdx.x % BLOCK_N;
  bool some = false, all = true;
  if (key < keys) {
    for (int row = threadIdx.x / BLOCK_N; row < BLOCK_M; row += THREADS / BLOCK_N) {
      const int query = q_block * BLOCK_M + row;
      if (query >= queries) break;
      const Leaves found = leaves(mask, from + query * row_step + key * key_step);
      some = some || found.some;
      all = all && found.all;
    }
    if (some) seen[(i64)batch * keys + key] = 1;
  }
  const bool any = __syncthreads_or(some);
  const bool whole = __syncthreads_and(all);
  if (threadIdx.x == 0) states[(i64)entry * tiles + tile] = whole ? 2 : any;
}
