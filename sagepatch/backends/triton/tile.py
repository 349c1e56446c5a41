"""What one tile of keys adds to a block of queries: scores, running softmax, P times V. One body
for every recipe, masked or not.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sagepatch.backends.triton.primitives import (
    in_key_order,
    mask_of,
    masked,
    seen_by_position,
    tanh,
    to_e4m3,
    to_int8,
)


@triton.jit
def _values(
    p,
    v_at,
    v_row,
    start,
    keys,
    dv,
    skv_pad,
    PV: tl.constexpr,
    HALF: tl.constexpr,
    DVP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of P times V, fp32 [BLOCK_M, width of dv]; `p` holds codes already."""
    if TMA:
        if PV == "fp16":
            v = v_at.load([v_row + start, 0])
        else:
            v = tl.trans(v_at.load([v_row, start]))
    elif PV == "fp16":
        v = tl.load(v_at + keys[:, None] * DVP + dv[None, :])
    else:
        v = tl.trans(tl.load(v_at + dv[:, None] * skv_pad + keys[None, :]))
    if HALF:
        out = tl.dot(p, v, out_dtype=tl.float16)
    elif PV == "int8":
        out = tl.dot(p, v, out_dtype=tl.int32)
    else:
        out = tl.dot(p, v)
    return out.to(tl.float32)


@triton.jit
def add_tile(
    acc0,
    acc1,
    m,
    l,
    q0,
    q1,
    q_scale,
    shift,
    q_mean,
    rows,
    start,
    k_at,
    ks_at,
    v_at,
    k_row,
    v_row,
    pad_start,
    raw_k_at,
    k_mean,
    mask_at,
    q_len,
    kv_len,
    skv_pad,
    stride_ks,
    stride_kd,
    stride_mq,
    stride_mk,
    causal_offset,
    window,
    cap_log2,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    SCALAR_K: tl.constexpr,
    PV: tl.constexpr,
    HALF: tl.constexpr,
    P_LOG2: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DP2: tl.constexpr,
    DV0: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """Take one tile of keys into the running softmax."""
    DP: tl.constexpr = D0 + D1
    DVP: tl.constexpr = DV0 + DV1
    keys = start + tl.arange(0, BLOCK_N)
    mask_value = q_scale
    if MASKED and MASK != 0:
        mask_value = mask_of(mask_at, stride_mq, stride_mk, rows, keys, q_len, kv_len)
    if TMA:
        products = tl.dot(q0, tl.trans(k_at.load([k_row + start, 0])))  # int32
    else:
        at = k_at + keys[:, None] * DP
        products = tl.dot(q0, tl.trans(tl.load(at + tl.arange(0, D0)[None, :])))
    if D1 > 0:
        k1 = tl.load(at + D0 + tl.arange(0, D1)[None, :])
        products = tl.dot(q1, tl.trans(k1), products, out_dtype=tl.int32)
    PLAIN: tl.constexpr = not (MASKED or SOFTCAP or SMOOTH_Q)
    if SCALAR_K:
        # One scale a tile: the maximum is taken on integers and one multiply scales a score.
        s = products.to(tl.float32)
        factor = q_scale * tl.load(ks_at + start)
        if PLAIN:
            top = tl.max(products, 1).to(tl.float32) * factor
    else:
        s = products.to(tl.float32) * tl.load(ks_at + keys)[None, :]
        factor = q_scale
        if PLAIN:
            top = tl.max(s, 1) * factor
    if PLAIN:
        m_new = tl.maximum(m, top)
        base = m_new
        p = tl.math.exp2(s * factor[:, None] - (m_new - P_LOG2)[:, None])
    else:
        s = s * factor[:, None]
        if SMOOTH_Q:
            d = tl.arange(0, DP2)
            inside = (keys < kv_len)[:, None] & (d < D)[None, :]
            raw = raw_k_at + keys.to(tl.int64)[:, None] * stride_ks + d[None, :] * stride_kd
            k = tl.load(raw, mask=inside, other=0.0).to(tl.float32) - k_mean[None, :]
            s += tl.sum(k * q_mean[None, :], 1)[None, :]
        if SOFTCAP:
            s = cap_log2 * tanh((s + shift[:, None]) / cap_log2)
        if MASKED:
            seen = seen_by_position(rows, keys, kv_len, causal_offset, window, CAUSAL, WINDOW)
            s = masked(s, seen, mask_value, MASK)
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - (base - P_LOG2)[:, None])
    decay = tl.math.exp2(m - base)
    l = l * decay + tl.sum(p, 1)
    if PV == "fp16":
        codes = p.to(tl.float16)
    elif PV == "int8":
        codes = in_key_order(to_int8(p), BLOCK_M, BLOCK_N)
    else:
        codes = in_key_order(to_e4m3(p, BY_HAND), BLOCK_M, BLOCK_N)
    # `v_row` holds the padding before a packed member, where keys are rows.
    v_start = start if PV == "fp16" else pad_start + start
    # Two levels: the tile's sum ends before it meets the running one.
    acc0 = acc0 * decay[:, None] + _values(
        codes, v_at, v_row, v_start, keys, tl.arange(0, DV0), skv_pad, PV, HALF, DVP, TMA
    )
    if DV1 > 0:
        acc1 = acc1 * decay[:, None] + _values(
            codes, v_at, v_row, v_start, keys, DV0 + tl.arange(0, DV1), skv_pad, PV, HALF, DVP, TMA
        )
    return acc0, acc1, m_new, l
