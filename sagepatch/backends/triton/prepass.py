"""The pre-pass: codes and scales of Q, K and V in two launches, statistics and quantising, from
tensors of any strides. No attention in here.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagepatch.backends.triton.launching import Recording, launch
from sagepatch.backends.triton.primitives import (
    LOG2E,
    inverse_and_scale,
    magnitude_bits,
    member_of,
    span_of,
    to_e4m3,
    to_int8,
)
from sagepatch.backends.triton.tiles import PAD, pieces
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# Interpreted kernels run on the CPU, where casts to E4M3 need help.
INTERPRETED = bool(triton.knobs.runtime.interpret)
STATS_ROWS = 64
# Programs that fill a large GPU; every quantising program reads the sums of all chunks of its head.
STATS_PROGRAMS = 512
MOST_CHUNKS = 32
V_ROWS = 64
CODE_DTYPE = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads. Padded keys hold zeros; `skv_pad` is the keys of one row of heads."""

    q_i8: Tensor  # [B, Hq, Sq, DP]
    q_scale_log2: Tensor  # [B, Hq, Sq], carries scale * log2(e)
    k_i8: Tensor  # [B, Hkv, skv_pad, DP]
    k_scale: Tensor  # [B, Hkv, skv_pad], one a key whatever the granularity
    v_codes: Tensor  # [B, Hkv, DVP, skv_pad], or [B, Hkv, skv_pad, DVP] in FP16
    v_scale: Tensor  # [groups, DVP2], a group is a batch member or packed member and a head
    shift_log2: Tensor | None  # [B, Hq, Sq], scale * log2(e) * q . k_mean
    q_mean_log2: Tensor | None  # [B, Hq, q blocks, DP2] times scale * log2(e)
    k_mean: Tensor | None  # [groups, DP2]
    skv_pad: int
    mean_blocks: int


@triton.jit
def _stats(
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
def _mean_of(k_sum, k_count, group, CHUNKS: tl.constexpr, DP2: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    d = tl.arange(0, DP2)
    at = group.to(tl.int64) * CHUNKS + chunk
    count = tl.sum(tl.load(k_count + at), 0)
    total = tl.sum(tl.load(k_sum + at[:, None] * DP2 + d[None, :]), 0)
    return total / tl.maximum(count, 1.0)


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
    ).to(tl.float32)
    out_row = row_of_heads * q_len + token
    group = item * heads + head // (q_heads // heads)
    if SHIFT:
        if SMOOTH_K:
            mean = _mean_of(k_sum, k_count, group, CHUNKS, DP2)
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
    index,
    K,
    Seen,
    CuK,
    k_sum,
    k_count,
    k_i8,
    k_scale,
    k_mean,
    k_blocks,
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
    """One block of keys."""
    d = tl.arange(0, DP2)
    block = index % k_blocks
    row_of_heads = (index // k_blocks).to(tl.int64)  # batch * Hkv + head
    head = row_of_heads % heads
    batch = row_of_heads // heads
    if PACKED:
        item = member_of(CuK, members, block * K_ROWS // KV_PAD, KV_PAD).to(tl.int64)
        start, length = span_of(CuK, item, kv_len)
        pad_start = ((start // KV_PAD + item) * KV_PAD).to(tl.int32)
    else:
        item = batch
        start = index * 0
        length = index * 0 + kv_len
        pad_start = index * 0
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
    ).to(tl.float32)
    group = item * heads + head
    if SMOOTH_K:
        mean = _mean_of(k_sum, k_count, group, CHUNKS, DP2)
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
def _quantise_v(
    index,
    V,
    Seen,
    CuK,
    v_peak,
    v_codes,
    v_scale,
    v_blocks,
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
    """One block of values."""
    block = index % v_blocks
    row_of_heads = (index // v_blocks).to(tl.int64)
    head = row_of_heads % heads
    batch = row_of_heads // heads
    if PACKED:
        item = member_of(CuK, members, block * V_ROWS // KV_PAD, KV_PAD).to(tl.int64)
        start, length = span_of(CuK, item, kv_len)
        pad_start = ((start // KV_PAD + item) * KV_PAD).to(tl.int32)
    else:
        item = batch
        start = index * 0
        length = index * 0 + kv_len
        pad_start = index * 0
    dv = tl.arange(0, DVP2)
    padded = block * V_ROWS + tl.arange(0, V_ROWS)
    local = padded - pad_start
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


@triton.jit
def _quantise(
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
    k_programs,
    v_programs,
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
    # Keys and values first: some of them still sit in the cache that the statistics filled.
    if pid < k_programs:
        _quantise_k(
            pid,
            K,
            Seen,
            CuK,
            k_sum,
            k_count,
            k_i8,
            k_scale,
            k_mean,
            k_blocks,
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
    elif pid < k_programs + v_programs:
        _quantise_v(
            pid - k_programs,
            V,
            Seen,
            CuK,
            v_peak,
            v_codes,
            v_scale,
            v_blocks,
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
    else:
        _quantise_q(
            pid - k_programs - v_programs,
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


def _chunks(groups: int, kv_len: int) -> int:
    """Parts that the keys of one head are summed in; a pure function, so that sums repeat."""
    wanted = -(-STATS_PROGRAMS // groups)
    useful = -(-kv_len // STATS_ROWS)
    rounded: int = triton.next_power_of_2(max(1, min(wanted, useful)))
    return min(rounded, MOST_CHUNKS)


def prepare(
    call: Call, recipe: Recipe, seen: Tensor | None, recording: Recording | None = None
) -> Codes:
    """Quantise the tensors of `call` as `recipe` says; `seen` [B, Skv] is 0 where a key is hidden
    from everybody. Skv and Sq are at least 1.
    """
    q, k, v = call.q, call.k, call.v
    B, Hq, Sq, D = q.shape
    Hkv, Skv, Dv = k.shape[1], k.shape[2], v.shape[3]
    packed = call.packed
    members = 1 if call.cu_seqlens_kv is None else call.cu_seqlens_kv.numel() - 1
    groups = Hkv * (members if packed else B)
    skv_pad = (Skv // PAD + members) * PAD if packed else -(-Skv // PAD) * PAD
    DP, DVP = sum(pieces(D, 32)), sum(pieces(Dv, 16))
    DP2, DVP2 = triton.next_power_of_2(DP), triton.next_power_of_2(DVP)
    chunks = _chunks(groups, Skv)
    grows = recipe.q_granularity == "block" or recipe.smooth_q
    q_rows = recipe.q_block if grows else 64
    k_rows = max(64, recipe.k_block) if recipe.k_granularity == "block" else 64
    q_blocks = Sq // q_rows + members if packed else -(-Sq // q_rows)
    k_blocks, v_blocks = skv_pad // k_rows, skv_pad // V_ROWS
    shift = call.return_lse or call.softcap is not None or call.sinks is not None
    f32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    k_sum = torch.empty((groups * chunks, DP2), **f32)
    k_count = torch.empty((groups * chunks,), **f32)
    v_peak = torch.empty((groups * chunks, DVP2), dtype=torch.int32, device=q.device)
    v_shape = (B, Hkv, skv_pad, DVP) if recipe.pv == "fp16" else (B, Hkv, DVP, skv_pad)
    codes = Codes(
        q_i8=torch.empty((B, Hq, Sq, DP), dtype=torch.int8, device=q.device),
        q_scale_log2=torch.empty((B, Hq, Sq), **f32),
        k_i8=torch.empty((B, Hkv, skv_pad, DP), dtype=torch.int8, device=q.device),
        k_scale=torch.empty((B, Hkv, skv_pad), **f32),
        v_codes=torch.empty(v_shape, dtype=CODE_DTYPE[recipe.pv], device=q.device),
        v_scale=torch.empty((groups, DVP2), **f32),
        shift_log2=torch.empty((B, Hq, Sq), **f32) if shift else None,
        q_mean_log2=torch.empty((B, Hq, q_blocks, DP2), **f32) if recipe.smooth_q else None,
        k_mean=torch.empty((groups, DP2), **f32) if recipe.smooth_q else None,
        skv_pad=skv_pad,
        mean_blocks=q_blocks,
    )
    seen_strides = (0, 0) if seen is None else (seen.stride(0), seen.stride(1))
    launch(
        _stats,
        groups * chunks,
        (
            k,
            v,
            seen,
            call.cu_seqlens_kv,
            k_sum,
            k_count,
            v_peak,
            Hkv,
            Skv,
            *k.stride(),
            *v.stride(),
            *seen_strides,
        ),
        {
            "CHUNKS": chunks,
            "D": D,
            "DV": Dv,
            "DP2": DP2,
            "DVP2": DVP2,
            "ROWS": STATS_ROWS,
            "PACKED": packed,
            "HAS_SEEN": seen is not None,
            "SMOOTH_K": recipe.smooth_k,
        },
        recording,
        num_warps=4,
    )
    launch(
        _quantise,
        B * Hq * q_blocks + B * Hkv * (k_blocks + v_blocks),
        (
            q,
            k,
            v,
            seen,
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            k_sum,
            k_count,
            v_peak,
            codes.q_i8,
            codes.q_scale_log2,
            codes.k_i8,
            codes.k_scale,
            codes.v_codes,
            codes.v_scale,
            codes.shift_log2,
            codes.q_mean_log2,
            codes.k_mean,
            call.scale * LOG2E.value,
            B * Hkv * k_blocks,
            B * Hkv * v_blocks,
            q_blocks,
            k_blocks,
            v_blocks,
            Hq,
            Hkv,
            members,
            Sq,
            Skv,
            skv_pad,
            codes.mean_blocks,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *seen_strides,
        ),
        {
            "CHUNKS": chunks,
            "D": D,
            "DV": Dv,
            "DP": DP,
            "DVP": DVP,
            "DP2": DP2,
            "DVP2": DVP2,
            "QK_MAX": float(recipe.qk_max),
            "Q_BLOCK": recipe.q_granularity == "block",
            "K_GROUPS": {"token": 0, "block": 1, "thread": 4}[recipe.k_granularity],
            "PV": recipe.pv,
            "V_RANGE": float(recipe.v_range),
            "Q_ROWS": q_rows,
            "K_ROWS": k_rows,
            "V_ROWS": V_ROWS,
            "KV_PAD": PAD,
            "PACKED": packed,
            "HAS_SEEN": seen is not None,
            "SMOOTH_K": recipe.smooth_k,
            "SMOOTH_Q": recipe.smooth_q,
            "SHIFT": shift,
            "BY_HAND": INTERPRETED,
        },
        recording,
        num_warps=8 if DP2 > 64 or DVP2 > 64 else 4,
        enable_fp_fusion=False,
    )
    return codes
