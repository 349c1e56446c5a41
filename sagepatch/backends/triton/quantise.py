"""The second launch of the pre-pass: codes and scales of a block of queries, keys or values."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sagepatch.backends.triton.primitives import (
    inverse_and_scale,
    magnitude_bits,
    member_of,
    span_of,
    to_int8,
)
from sagepatch.backends.triton.quantise_values import quantise_values
from sagepatch.backends.triton.statistics import mean_of


@triton.jit
def _quantise_q(
    index,
    Q,
    CuQ,
    k_sum,
    k_count,
    q_i8,
    q_scale_log2,
    shift_log2,
    q_mean_log2,
    factor,
    q_blocks,
    q_heads,
    heads,
    members,
    q_len,
    mean_blocks,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DP2: tl.constexpr,
    QK_MAX: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    Q_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """One block of queries."""
    d = tl.arange(0, DP2)
    block = index % q_blocks
    row_of_heads = (index // q_blocks).to(tl.int64)  # batch * Hq + head
    head = row_of_heads % q_heads
    batch = row_of_heads // q_heads
    if PACKED:
        item = member_of(CuQ, members, block, Q_ROWS).to(tl.int64)
        start, length = span_of(CuQ, item, q_len)
        # A wrong first offset must not make the block negative.
        block = tl.maximum(block - (tl.load(CuQ + item).to(tl.int32) // Q_ROWS + item), 0).to(
            tl.int32
        )
        mean_block = start // Q_ROWS + item + block
    else:
        item = batch
        start = index * 0
        length = index * 0 + q_len
        mean_block = block
    local = block * Q_ROWS + tl.arange(0, Q_ROWS)
    valid = local < length
    token = (start + local).to(tl.int64)
    at = Q + batch * stride_qb + head * stride_qh
    x = tl.load(
        at + token[:, None] * stride_qs + d[None, :] * stride_qd,
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    out_row = row_of_heads * q_len + token
    group = item * heads + head // (q_heads // heads)
    if SHIFT:
        if SMOOTH_K:
            mean = mean_of(k_sum, k_count, group, CHUNKS, DP2)
            tl.store(shift_log2 + out_row, tl.sum(x * mean[None, :], 1) * factor, mask=valid)
        else:
            tl.store(shift_log2 + out_row, tl.zeros([Q_ROWS], tl.float32), mask=valid)
    if SMOOTH_Q:
        rows = tl.minimum(tl.maximum(length - block * Q_ROWS, 1), Q_ROWS)
        mean = tl.div_rn(tl.sum(x, 0), (rows + tl.zeros([DP2], tl.int32)).to(tl.float32))
        if block * Q_ROWS < length:
            mean_at = q_mean_log2 + (row_of_heads * mean_blocks + mean_block) * DP2 + d
            tl.store(mean_at, mean * factor)
        x = tl.where(valid[:, None], x - mean[None, :], 0.0)
    bits = tl.max(magnitude_bits(x), 1)
    if Q_BLOCK:
        bits = tl.max(bits, 0) + tl.zeros([Q_ROWS], tl.int32)
    inverse, scale = inverse_and_scale(bits, QK_MAX)
    # Attention takes maxima of integer products: the sign of the softmax scale goes to the codes.
    inverse = tl.where(factor < 0, -inverse, inverse)
    scale = scale * tl.abs(factor)
    # Beyond this products of scales leave fp32; a softmax is one-hot there anyway.
    scale = tl.where(scale > 1e16, 1e16, scale)
    tl.store(q_scale_log2 + out_row, scale, mask=valid)
    tl.store(
        q_i8 + out_row[:, None] * DP + d[None, :],
        to_int8(x * inverse[:, None]),
        mask=valid[:, None] & (d < DP)[None, :],
    )


@triton.jit
def _quantise_k(
    row_of_heads,
    block,
    K,
    Seen,
    CuK,
    k_sum,
    k_count,
    k_i8,
    k_scale,
    k_mean,
    heads,
    members,
    kv_len,
    skv_pad,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_seen_b,
    stride_seen_k,
    CHUNKS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DP2: tl.constexpr,
    QK_MAX: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_ROWS: tl.constexpr,
    KV_PAD: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
):
    """One block of keys of one row of heads, batch * Hkv + head."""
    d = tl.arange(0, DP2)
    head = row_of_heads % heads
    batch = row_of_heads // heads
    if PACKED:
        item = member_of(CuK, members, block * K_ROWS // KV_PAD, KV_PAD).to(tl.int64)
        start, length = span_of(CuK, item, kv_len)
        pad_start = ((start // KV_PAD + item) * KV_PAD).to(tl.int32)
    else:
        item = batch
        start = block * 0
        length = block * 0 + kv_len
        pad_start = block * 0
    padded = block * K_ROWS + tl.arange(0, K_ROWS)
    local = padded - pad_start
    valid = (local >= 0) & (local < length)
    token = (start + local).to(tl.int64)
    if HAS_SEEN:
        seen = tl.load(Seen + batch * stride_seen_b + token * stride_seen_k, mask=valid, other=0)
        valid = valid & (seen != 0)
    x = tl.load(
        K
        + batch * stride_kb
        + head * stride_kh
        + token[:, None] * stride_ks
        + d[None, :] * stride_kd,
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)
    group = item * heads + head
    if SMOOTH_K:
        mean = mean_of(k_sum, k_count, group, CHUNKS, DP2)
        if SMOOTH_Q:
            if block * K_ROWS == pad_start:
                tl.store(k_mean + group * DP2 + d, mean)
        x = tl.where(valid[:, None], x - mean[None, :], 0.0)
    bits = tl.max(magnitude_bits(x), 1)  # [K_ROWS]
    if K_GROUPS == 1:
        bits = tl.max(bits, 0) + tl.zeros([K_ROWS], tl.int32)
    if K_GROUPS == 4:
        # Keys with the same (index mod 8) // 2 of 64 share a scale.
        four = tl.max(tl.max(tl.reshape(bits, [K_ROWS // 8, 4, 2]), 2), 0)
        four = four[None, :, None] + tl.zeros([K_ROWS // 8, 4, 2], tl.int32)
        bits = tl.reshape(four, [K_ROWS])
    inverse, scale = inverse_and_scale(bits, QK_MAX)
    scale = tl.where(scale > 1e15, 1e15, scale)
    row = row_of_heads * skv_pad + padded
    tl.store(k_scale + row, scale, mask=padded < skv_pad)
    tl.store(
        k_i8 + row[:, None] * DP + d[None, :],
        to_int8(x * inverse[:, None]),
        mask=(padded < skv_pad)[:, None] & (d < DP)[None, :],
    )


@triton.jit
def quantise(
    Q,
    K,
    V,
    Seen,
    CuQ,
    CuK,
    k_sum,
    k_count,
    v_peak,
    q_i8,
    q_scale_log2,
    k_i8,
    k_scale,
    v_codes,
    v_scale,
    shift_log2,
    q_mean_log2,
    k_mean,
    factor,
    kv_programs,
    q_blocks,
    k_blocks,
    v_blocks,
    q_heads,
    heads,
    members,
    q_len,
    kv_len,
    skv_pad,
    mean_blocks,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_qd,
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
    DP: tl.constexpr,
    DVP: tl.constexpr,
    DP2: tl.constexpr,
    DVP2: tl.constexpr,
    QK_MAX: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_GROUPS: tl.constexpr,
    PV: tl.constexpr,
    V_RANGE: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
    KV_PAD: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    pid = tl.program_id(0)
    # Keys and values of a head together, the last head first: what the statistics read last is
    # what the cache still holds.
    of_head = k_blocks + v_blocks
    turn = kv_programs - 1 - pid
    kv_head = turn // of_head
    block = turn % of_head
    if pid >= kv_programs:
        _quantise_q(
            pid - kv_programs,
            Q,
            CuQ,
            k_sum,
            k_count,
            q_i8,
            q_scale_log2,
            shift_log2,
            q_mean_log2,
            factor,
            q_blocks,
            q_heads,
            heads,
            members,
            q_len,
            mean_blocks,
            stride_qb,
            stride_qh,
            stride_qs,
            stride_qd,
            CHUNKS,
            D,
            DP,
            DP2,
            QK_MAX,
            Q_BLOCK,
            Q_ROWS,
            PACKED,
            SMOOTH_K,
            SMOOTH_Q,
            SHIFT,
        )
    elif block < k_blocks:
        _quantise_k(
            kv_head.to(tl.int64),
            block,
            K,
            Seen,
            CuK,
            k_sum,
            k_count,
            k_i8,
            k_scale,
            k_mean,
            heads,
            members,
            kv_len,
            skv_pad,
            stride_kb,
            stride_kh,
            stride_ks,
            stride_kd,
            stride_seen_b,
            stride_seen_k,
            CHUNKS,
            D,
            DP,
            DP2,
            QK_MAX,
            K_GROUPS,
            K_ROWS,
            KV_PAD,
            PACKED,
            HAS_SEEN,
            SMOOTH_K,
            SMOOTH_Q,
        )
    else:
        quantise_values(
            kv_head.to(tl.int64),
            block - k_blocks,
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
            CHUNKS,
            DV,
            DVP,
            DVP2,
            PV,
            V_RANGE,
            V_ROWS,
            KV_PAD,
            PACKED,
            HAS_SEEN,
            BY_HAND,
        )
