// Tokens in memory: eight elements a thread from tensors of any strides, and members of packed
// calls. Expects the macro VECTORS (1: channels are contiguous and every row starts 16-byte aligned).

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

template <int TYPE>
constexpr int SIZE_OF = TYPE == FP32 ? 4 : 2;

struct Strides {
  i64 batch, head, token, channel;
};

// A number that is divided by often: n / by = (n * multiplier) >> (32 + shift) for 0 <= n < 2^31
// (multiplier 0: by is 1).
struct Divisor {
  int by;
  u32 multiplier, shift;
};

struct Divided {
  int quotient, rest;
};

__device__ __forceinline__ Divided divide(int n, const Divisor& d) {
  const int quotient = d.multiplier ? __umulhi(n, d.multiplier) >> d.shift : n;
  return {quotient, n - quotient * d.by};
}

// Eight neighbouring channels of a token, as they lie in memory.
template <int TYPE>
struct Eight {
  u32 word[TYPE == FP32 ? 8 : 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32& w : word) w = 0;
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (TYPE == FP32) {
      return __uint_as_float(word[i]);
    } else if constexpr (TYPE == BF16) {
      return __uint_as_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
    } else {
      return from_fp16(i % 2 ? word[i / 2] >> 16 : word[i / 2]);
    }
  }
};

// Channels first..first + 7 of the token at `row`, those from `channels` on zero.
template <int TYPE>
__device__ __forceinline__ void load_eight(Eight<TYPE>& x, const char* row, i64 stride, int first,
                                           int channels, u64 policy) {
  if constexpr (VECTORS) {
    if (first < channels) {
      const char* at = row + first * SIZE_OF<TYPE>;
      load16(x.word, at, policy);
      if constexpr (TYPE == FP32) load16(x.word + 4, at + 16, policy);
    } else {
      x.clear();
    }
  } else {
    x.clear();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (first + i < channels) {
        if constexpr (TYPE == FP32) {
          x.word[i] = reinterpret_cast<const u32*>(row)[(first + i) * stride];
        } else {
          const u32 half = reinterpret_cast<const unsigned short*>(row)[(first + i) * stride];
          x.word[i / 2] |= half << (i % 2 * 16);
        }
      }
    }
  }
}

// Where a token of a head lies, and how far its neighbour is, in bytes.
template <int TYPE>
__device__ __forceinline__ const char* token_at(const void* data, const Strides& s, i64 batch,
                                                i64 head, i64 token) {
  const i64 element = batch * s.batch + head * s.head + token * s.token;
  return static_cast<const char*>(data) + element * SIZE_OF<TYPE>;
}

template <int TYPE>
__device__ __forceinline__ i64 token_step(const Strides& s) {
  return s.token * SIZE_OF<TYPE>;
}

// ---- packed calls

// First token and length of a member; offsets out of range are cut to the tensor.
struct Span {
  int start, length;
};

__device__ __forceinline__ Span span_of(const int* offsets, int member, int total) {
  const int start = min(max(offsets[member], 0), total);
  const int stop = min(max(offsets[member + 1], start), total);
  return {start, stop - start};
}

// Member i owns the blocks from offsets[i] / unit + i on: enough for its tokens, whatever its
// length, and known without a sum over the members before it.
__device__ __forceinline__ int first_block(const int* offsets, int member, int unit) {
  return max(offsets[member], 0) / unit + member;
}

// The member that owns block number `block` of `unit` tokens.
__device__ __forceinline__ int member_of(const int* offsets, int members, int block, int unit) {
  int low = 0, high = members - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_block(offsets, middle, unit) <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}
