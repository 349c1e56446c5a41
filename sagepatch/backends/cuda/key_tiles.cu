// Which tiles of BLOCK_N keys a key mask leaves anything of: one block of 1024 threads a batch member.
// Whole tiles are listed from the front, partial ones from the back, both in order of keys, so that
// results repeat. Knows no attention.

#include "hopper.cuh"

extern "C" __global__ void __launch_bounds__(1024) key_tiles(
    const uint32_t* key_bits,  // [B, words], bit j of word w: key 32 w + j is seen
    int* list,                 // [B, tiles]
    int* counts,               // [B, 2], whole and partial tiles
    int tiles, int words) {
  __shared__ int sums[2][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  key_bits += (long long)blockIdx.x * words;
  list += (long long)blockIdx.x * tiles;
  int whole = 0, partial = 0;  // listed so far
  for (int first = 0; first < tiles; first += 1024) {
    const int tile = first + threadIdx.x;
    int seen = 0;
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < BLOCK_N / 32; i++) {
        const int word = tile * (BLOCK_N / 32) + i;
        if (word < words) seen += __popc(key_bits[word]);
      }
    }
    const uint32_t wholes = __ballot_sync(~0u, seen == BLOCK_N);
    const uint32_t partials = __ballot_sync(~0u, seen > 0 && seen < BLOCK_N);
    if (lane == 0) {
      sums[0][warp] = __popc(wholes);
      sums[1][warp] = __popc(partials);
    }
    __syncthreads();
    const uint32_t before = (1u << lane) - 1;
    int front = whole + __popc(wholes & before), back = partial + __popc(partials & before);
    for (int i = 0; i < 32; i++) {
      if (i < warp) {
        front += sums[0][i];
        back += sums[1][i];
      }
      whole += sums[0][i];
      partial += sums[1][i];
    }
    if (seen == BLOCK_N) list[front] = tile;
    else if (seen > 0) list[tiles - 1 - back] = tile;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    counts[blockIdx.x * 2] = whole;
    counts[blockIdx.x * 2 + 1] = partial;
  }
}
