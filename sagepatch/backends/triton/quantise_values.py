"""What the second launch of the pre-pass does with a block of values."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sagepatch.backends.triton.primitives import (
    inverse_and_scale,
    key_at,
    member_of,
    span_of,
    to_e4m3,
    to_int8,
)


@triton.jit
def quantise_values(
    row_of_heads,
    block,
    V,
    Seen,
    CuK,
    v_peak,
    v_codes,
    v_scale,
    heads,
    members,
    kv_len,
    skv_pad,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_seen_b,
    stride_seen_k,
    CHUNKS: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    DVP2: tl.constexpr,
    PV: tl.constexpr,
    V_RANGE: tl.constexpr,
    V_ROWS: tl.constexpr,
    KV_PAD: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """One block of values of one row of heads, batch * Hkv + head."""
    head = row_of_heads % heads
    batch = row_of_heads // heads
    if PACKED:
        item = member_of(CuK, members, block * V_ROWS // KV_PAD, KV_PAD).to(tl.int64)
        start, length = span_of(CuK, item, kv_len)
        pad_start = ((start // KV_PAD + item) * KV_PAD).to(tl.int32)
    else:
        item = batch
        start = block * 0
        length = block * 0 + kv_len
        pad_start = block * 0
    dv = tl.arange(0, DVP2)
    padded = block * V_ROWS + tl.arange(0, V_ROWS)
    if PV == "fp16":
        local = padded - pad_start
    else:
        local = key_at(padded) - pad_start
    valid = (local >= 0) & (local < length)
    token = (start + local).to(tl.int64)
    if HAS_SEEN:
        seen = tl.load(Seen + batch * stride_seen_b + token * stride_seen_k, mask=valid, other=0)
        valid = valid & (seen != 0)
    x = tl.load(
        V
        + batch * stride_vb
        + head * stride_vh
        + token[:, None] * stride_vs
        + dv[None, :] * stride_vd,
        mask=valid[:, None] & (dv < DV)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    group = item * heads + head
    chunk_at = group * CHUNKS + tl.arange(0, CHUNKS)
    bits = tl.max(tl.load(v_peak + chunk_at[:, None] * DVP2 + dv[None, :]), 0)  # [DVP2]
    if PV == "fp16":
        amax = bits.to(tl.float32, bitcast=True)
        # The power of two at or above amax / V_RANGE, read off the bits.
        ratio = tl.div_rn(amax, V_RANGE).to(tl.int32, bitcast=True)
        power = ((ratio + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        fits = (amax <= V_RANGE) | (bits >= 0x7F800000)
        scale = tl.where(fits, 1.0, power)
        scale = tl.where(bits > 0x7F800000, float("nan"), scale)
        inverse = tl.div_rn(1.0, scale)
    else:
        inverse, scale = inverse_and_scale(bits, V_RANGE)
    if block * V_ROWS == pad_start:
        tl.store(v_scale + group * DVP2 + dv, scale)
    x = x * inverse[None, :]
    if PV == "fp16":
        row = row_of_heads * skv_pad + padded
        tl.store(
            v_codes + row[:, None] * DVP + dv[None, :],
            x.to(tl.float16),
            mask=(padded < skv_pad)[:, None] & (dv < DVP)[None, :],
        )
    else:
        if PV == "int8":
            codes = to_int8(x)
        else:
            codes = to_e4m3(x, BY_HAND)
        # Transposed: 8-bit matrix units want both operands along keys.
        row = row_of_heads * DVP + dv
        tl.store(
            v_codes + row[None, :] * skv_pad + padded[:, None],
            codes,
            mask=(padded < skv_pad)[:, None] & (dv < DVP)[None, :],
        )
