// What becomes of a block of queries after its last tile: sinks, log-sum-exp, normalised and written
// in the caller's order. Needs mma_softmax.cuh.

constexpr float LN2 = 0.6931471805599453f;

// Two neighbouring columns of a row; the second only where it exists.
__device__ __forceinline__ void store_pair(void* out, int type, i64 at, float x, float y,
                                           bool second) {
  if (type == FP32) {
    float* to = (float*)out + at;
    to[0] = x;
    if (second) to[1] = y;
  } else {
    unsigned short* to = (unsigned short*)out + at;
    const u32 both = type == FP16 ? fp16x2(x, y) : bf16x2(x, y);
    if constexpr (VALUE_DIM % 2 == 0) {
      *(u32*)to = both;
    } else {
      to[0] = (unsigned short)both;
      if (second) to[1] = (unsigned short)(both >> 16);
    }
  }
}

// Of one row: what its sums are divided by, and its log-sum-exp in base 2.
struct Ended {
  float inverse, lse;
  bool empty;
};

// `shift` is what smoothing K took from the row's scores, `sink` one more score in base 2, -inf
// for none.
__device__ __forceinline__ Ended end_row(float m, float l, float shift, float sink) {
  if (sink != -infinity()) {
    // The sums are those of P_r p relative to m: at most P_r keys, and never over fp32.
    const float here = SOFTCAP ? m : m + shift;
    const float top = l == 0.f ? sink : here > sink || here != here ? here : sink;
    const float base = top == -infinity() ? 0.f : top;
    const float decay = l == 0.f ? 0.f : exp2_mufu(here - base);
    const float whole = l * decay + exp2_mufu(sink - base + P_LOG2);
    return {whole == 0.f ? 0.f : __fdividef(decay, whole), base + log2_mufu(whole) - P_LOG2,
            l == 0.f};
  }
  return {__fdividef(1.f, l), m + log2_mufu(l) - P_LOG2 + (SOFTCAP ? 0.f : shift), l == 0.f};
}

// My rows g and g + 8 of one tile of 16. A row that sees no key gives 0, whatever V holds. V's scale
// is last: a sum of many large values may not fit before it is an average.
__device__ __forceinline__ void store_rows(const float (&O)[V_TILES][4], const Ended (&ended)[2],
                                           const float* v_scale, void* out, int type,
                                           const i64 (&at)[2], const bool (&there)[2]) {
  const int column = 2 * (threadIdx.x & 3);
#pragma unroll
  for (int n = 0; n < V_TILES; n++) {
    const int c = n * 8 + column;
    const float2 scale = *(const float2*)(v_scale + c);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float x = ended[i].empty ? 0.f : O[n][2 * i] * ended[i].inverse * scale.x;
      const float y = ended[i].empty ? 0.f : O[n][2 * i + 1] * ended[i].inverse * scale.y;
      if (there[i] && c < VALUE_DIM) store_pair(out, type, at[i] + c, x, y, c + 1 < VALUE_DIM);
    }
  }
}
