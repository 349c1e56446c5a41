"""The first launch of the pre-pass: sums of K and largest magnitudes of V, in chunks of those keys
that somebody sees.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sagepatch.backends.triton.primitives import magnitude_bits, span_of


@triton.jit
def stats(
    K,
    V,
    Seen,
    CuK,
    k_sum,
    k_count,
    v_peak,
    heads,
    kv_len,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_seen_b,
    stride_seen_k,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP2: tl.constexpr,
    DVP2: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    SMOOTH_K: tl.constexpr,
):
    pid = tl.program_id(0)
    chunk = pid % CHUNKS
    group = pid // CHUNKS
    head = (group % heads).to(tl.int64)
    item = (group // heads).to(tl.int64)
    if PACKED:
        start, length = span_of(CuK, item, kv_len)
        batch = item * 0
    else:
        start = pid * 0
        length = pid * 0 + kv_len
        batch = item
    per = tl.cdiv(tl.cdiv(length, CHUNKS), ROWS) * ROWS
    first = chunk * per
    last = tl.minimum(first + per, length)
    d = tl.arange(0, DP2)
    dv = tl.arange(0, DVP2)
    total = tl.zeros([ROWS, DP2], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    peak = tl.zeros([ROWS, DVP2], tl.int32)
    k_head = K + batch * stride_kb + head * stride_kh
    v_head = V + batch * stride_vb + head * stride_vh
    for row in range(first, last, ROWS):
        local = row + tl.arange(0, ROWS)
        valid = local < last
        token = (start + local).to(tl.int64)
        if HAS_SEEN:
            seen = tl.load(
                Seen + batch * stride_seen_b + token * stride_seen_k, mask=valid, other=0
            )
            valid = valid & (seen != 0)
        if SMOOTH_K:
            k = tl.load(
                k_head + token[:, None] * stride_ks + d[None, :] * stride_kd,
                mask=valid[:, None] & (d < D)[None, :],
                other=0.0,
            )
            total += k.to(tl.float32)
            count += valid.to(tl.float32)
        v = tl.load(
            v_head + token[:, None] * stride_vs + dv[None, :] * stride_vd,
            mask=valid[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        peak = tl.maximum(peak, magnitude_bits(v.to(tl.float32)))
    at = pid.to(tl.int64)
    if SMOOTH_K:
        tl.store(k_sum + at * DP2 + d, tl.sum(total, 0))
        tl.store(k_count + at, tl.sum(count, 0))
    tl.store(v_peak + at * DVP2 + dv, tl.max(peak, 0))


@triton.jit
def mean_of(k_sum, k_count, group, CHUNKS: tl.constexpr, DP2: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    d = tl.arange(0, DP2)
    at = group.to(tl.int64) * CHUNKS + chunk
    count = tl.sum(tl.load(k_count + at), 0)
    total = tl.sum(tl.load(k_sum + at[:, None] * DP2 + d[None, :]), 0)
    return total / tl.maximum(count, 1.0)
