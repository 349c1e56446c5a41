"""The attention kernel: which tiles a block of queries meets, and what becomes of the sums."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from sagepatch.backends.triton.primitives import LOG2E, member_of, span_of
from sagepatch.backends.triton.tile import add_tile


@triton.jit
def _store(Out, acc, dv, rows, inside, stride_os, v_scale_at, inverse, empty, Flags, DV, GUARD):
    scale = tl.load(v_scale_at + dv)
    out = tl.where(empty[:, None], 0.0, acc * inverse[:, None] * scale[None, :])
    # After the cast: what fp32 holds may be infinite in FP16.
    out = out.to(Out.dtype.element_ty)
    keep = inside[:, None] & (dv < DV)[None, :]
    if GUARD:
        infinite = ~(tl.abs(out.to(tl.float32)) < float("inf"))
        bad = tl.max(tl.max((keep & infinite).to(tl.int32), 1), 0)
        tl.atomic_max(Flags, bad, mask=bad != 0)
    at = Out + rows.to(tl.int64)[:, None] * stride_os + dv[None, :]
    tl.store(at, out, mask=keep)


@triton.jit
def attention(
    q_i8,
    q_scale_log2,
    k_i8,
    k_scale,
    v_codes,
    v_scale,
    shift_log2,
    q_mean_log2,
    k_mean,
    K,
    Mask,
    Tiles,
    Counts,
    Sinks,
    CuQ,
    CuK,
    Out,
    Lse,
    Flags,
    q_heads,
    group,
    members,
    q_len,
    kv_len,
    skv_pad,
    m_blocks,
    mean_blocks,
    list_tiles,
    stride_ob,
    stride_oh,
    stride_os,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    stride_list_b,
    stride_list_h,
    stride_list_q,
    causal_offset,
    window,
    cap_log2,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    LSE: tl.constexpr,
    GUARD: tl.constexpr,
    SMOOTH_Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    SCALAR_K: tl.constexpr,
    PV: tl.constexpr,
    HALF: tl.constexpr,
    P_LOG2: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    DP2: tl.constexpr,
    DV0: tl.constexpr,
    DV1: tl.constexpr,
    DVP2: tl.constexpr,
    KV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    DP: tl.constexpr = D0 + D1
    DVP: tl.constexpr = DV0 + DV1
    pid = tl.program_id(0)
    row_of_heads = (pid // m_blocks).to(tl.int64)  # batch * Hq + head
    # Under a causal mask the longest rows start first.
    block = m_blocks - 1 - pid % m_blocks if CAUSAL else pid % m_blocks
    batch = row_of_heads // q_heads
    head = row_of_heads % q_heads
    kv_heads = q_heads // group
    kv_head = head // group
    total_q = q_len
    k_start = pid * 0
    pad_start = pid * 0
    q_start = pid * 0
    item = batch
    if PACKED:
        item = member_of(CuQ, members, block, BLOCK_M).to(tl.int64)
        q_start, q_len = span_of(CuQ, item, q_len)
        block = tl.maximum(block - (tl.load(CuQ + item).to(tl.int32) // BLOCK_M + item), 0).to(
            tl.int32
        )
        k_start, kv_len = span_of(CuK, item, kv_len)
        pad_start = tl.multiple_of(((k_start // KV_PAD + item) * KV_PAD).to(tl.int32), KV_PAD)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < q_len
    q_row = row_of_heads * total_q + q_start + rows
    q_at = q_i8 + q_row[:, None] * DP
    q0 = tl.load(q_at + tl.arange(0, D0)[None, :], mask=inside[:, None], other=0)
    q1 = q0
    if D1 > 0:
        q1 = tl.load(q_at + D0 + tl.arange(0, D1)[None, :], mask=inside[:, None], other=0)
    q_scale = tl.load(q_scale_log2 + q_row, mask=inside, other=0.0)
    shift = q_scale
    if SOFTCAP or SINKS or LSE:
        shift = tl.load(shift_log2 + q_row, mask=inside, other=0.0)
    kv_row = batch * kv_heads + kv_head
    ks_at = k_scale + kv_row * skv_pad + pad_start
    k_row = (kv_row * skv_pad + pad_start).to(tl.int32)
    v_row = k_row
    if TMA:
        # Descriptors over all heads: a tile is a row and a column.
        k_at = k_i8
        v_at = v_codes
        if PV != "fp16":
            v_row = (kv_row * DVP).to(tl.int32)
    else:
        k_at = k_i8 + (kv_row * skv_pad + pad_start) * DP
        if PV == "fp16":
            v_at = v_codes + (kv_row * skv_pad + pad_start) * DVP
        else:
            v_at = v_codes + kv_row * skv_pad * DVP + pad_start
    raw_k_at = K
    q_mean = q_scale
    mean = q_scale
    if SMOOTH_Q:
        d = tl.arange(0, DP2)
        raw_k_at = K + batch * stride_kb + kv_head * stride_kh + k_start.to(tl.int64) * stride_ks
        mean = tl.load(k_mean + (item * kv_heads + kv_head) * DP2 + d)
        mean_block = block * BLOCK_M // Q_BLOCK
        if PACKED:
            mean_block += (q_start // Q_BLOCK + item).to(tl.int32)
        mean_block = tl.minimum(mean_block, mean_blocks - 1)
        q_mean = tl.load(q_mean_log2 + (row_of_heads * mean_blocks + mean_block) * DP2 + d)
    mask_at = Mask
    lists = Tiles
    if MASK != 0:
        mask_at = Mask + batch * stride_mb + head * stride_mh
        entry = batch * stride_list_b + head * stride_list_h + block * stride_list_q
        lists = Tiles + entry * list_tiles
        n_whole = tl.load(Counts + entry * 2)
        n_partial = tl.load(Counts + entry * 2 + 1)
        first_whole = n_whole * 0
        first = n_whole * 0
        n_left = n_whole * 0
        after_whole = n_whole * 0
    else:
        # Tiles from `first` to `stop` hold something; those from first_whole to after_whole all.
        low = pid * 0
        whole_low = pid * 0
        high = pid * 0 + kv_len
        whole_high = pid * 0 + kv_len
        if CAUSAL:
            last_row = tl.minimum(block * BLOCK_M + BLOCK_M, q_len) - 1
            high = tl.maximum(tl.minimum(high, last_row + causal_offset + 1), 0)
            whole_high = tl.maximum(tl.minimum(high, block * BLOCK_M + causal_offset + 1), 0)
            if WINDOW:
                low = tl.maximum(block * BLOCK_M + causal_offset - window + 1, 0)
                whole_low = tl.maximum(last_row + causal_offset - window + 1, 0)
        stop = tl.cdiv(high, BLOCK_N)
        first = tl.minimum(low // BLOCK_N, stop)
        first_whole = tl.minimum(tl.maximum(tl.cdiv(whole_low, BLOCK_N), first), stop)
        after_whole = tl.minimum(tl.maximum(whole_high // BLOCK_N, first_whole), stop)
        n_whole = after_whole - first_whole
        n_left = first_whole - first
        n_partial = n_left + stop - after_whole
        if PACKED:
            n_whole = tl.where(block * BLOCK_M < q_len, n_whole, 0)
            n_partial = tl.where(block * BLOCK_M < q_len, n_partial, 0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, DV1 if DV1 > 0 else 1], tl.float32)
    for i in tl.range(0, n_whole, num_stages=STAGES):
        if MASK != 0:
            start = tl.load(lists + i) * BLOCK_N
        else:
            start = (first_whole + i) * BLOCK_N
        acc0, acc1, m, l = add_tile(
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
            mean,
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
            False,
            MASK,
            CAUSAL,
            WINDOW,
            SOFTCAP,
            SMOOTH_Q,
            SCALAR_K,
            PV,
            HALF,
            P_LOG2,
            D,
            D0,
            D1,
            DP2,
            DV0,
            DV1,
            BLOCK_M,
            BLOCK_N,
            TMA,
            BY_HAND,
        )
    for i in tl.range(0, n_partial, num_stages=1):
        if MASK != 0:
            start = tl.load(lists + list_tiles - 1 - i) * BLOCK_N
        else:
            start = tl.where(i < n_left, first + i, after_whole + i - n_left) * BLOCK_N
        start = tl.multiple_of(start, BLOCK_N)
        acc0, acc1, m, l = add_tile(
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
            mean,
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
            True,
            MASK,
            CAUSAL,
            WINDOW,
            SOFTCAP,
            SMOOTH_Q,
            SCALAR_K,
            PV,
            HALF,
            P_LOG2,
            D,
            D0,
            D1,
            DP2,
            DV0,
            DV1,
            BLOCK_M,
            BLOCK_N,
            TMA,
            BY_HAND,
        )
    if (SINKS or LSE) and not SOFTCAP:
        # Smoothing K moved every score of a row by the same amount: give it back here.
        m += shift
    if SINKS:
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        # A sink of -inf over an empty row.
        safe = tl.where(top == float("-inf"), 0.0, top)
        decay = tl.math.exp2(m - safe)
        l = l * decay + tl.math.exp2(sink - safe + P_LOG2)
        acc0 = acc0 * decay[:, None]
        acc1 = acc1 * decay[:, None]
        m = top
    empty = l == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, l)
    out_at = Out + batch * stride_ob + head * stride_oh + q_start.to(tl.int64) * stride_os
    v_scale_at = v_scale + (item * kv_heads + kv_head) * DVP2
    dv0 = tl.arange(0, DV0)
    _store(out_at, acc0, dv0, rows, inside, stride_os, v_scale_at, inverse, empty, Flags, DV, GUARD)
    if DV1 > 0:
        dv1 = DV0 + tl.arange(0, DV1)
        _store(
            out_at, acc1, dv1, rows, inside, stride_os, v_scale_at, inverse, empty, Flags, DV, GUARD
        )
    if LSE:
        log2_sum = tl.math.log2(tl.where(empty, 1.0, l)) - P_LOG2
        lse = tl.where(empty, float("-inf"), (m + log2_sum) / LOG2E)
        tl.store(Lse + q_row, lse, mask=inside)


# For one key. A length of 1 would be a constant, which folds the codes of P of all other keys into
# one; there ptxas 12.8 and 12.9 pack E4M3 codes with a register that nothing wrote (head sizes that
# the copy engine does not serve), and what it holds may be NaN.
attention_of_one_key = triton.jit(attention.fn, do_not_specialize=["kv_len"])
