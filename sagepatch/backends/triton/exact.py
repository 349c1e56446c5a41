"""Exact attention in one Triton kernel that does nothing unless a flag on the device is up: what a
guard runs behind a quantised kernel without asking the host.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagepatch.backends.links import Link
from sagepatch.backends.positions import plain_positions
from sagepatch.backends.triton.launching import Recording, apart, launch, links_of, tensors_of
from sagepatch.backends.triton.primitives import (
    LOG2E,
    mask_of,
    masked,
    member_of,
    seen_by_position,
    span_of,
    tanh,
)
from sagepatch.spec import Call

BLOCK_M = 64
BLOCK_N = 32


@triton.jit
def exact_where(
    Flags,
    Q,
    K,
    V,
    Mask,
    Sinks,
    CuQ,
    CuK,
    Out,
    Lse,
    factor,
    cap_log2,
    q_heads,
    group,
    members,
    q_len,
    kv_len,
    m_blocks,
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
    stride_ob,
    stride_oh,
    stride_os,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mk,
    causal_offset,
    window,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    LSE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP2: tl.constexpr,
    DVP2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if tl.load(Flags) != 0:
        pid = tl.program_id(0)
        row_of_heads = (pid // m_blocks).to(tl.int64)
        block = pid % m_blocks
        batch = row_of_heads // q_heads
        head = row_of_heads % q_heads
        kv_head = head // group
        total_q = q_len
        q_start = pid * 0
        k_start = pid * 0
        if PACKED:
            item = member_of(CuQ, members, block, BLOCK_M).to(tl.int64)
            q_start, q_len = span_of(CuQ, item, q_len)
            block = (block - (tl.load(CuQ + item).to(tl.int32) // BLOCK_M + item)).to(tl.int32)
            k_start, kv_len = span_of(CuK, item, kv_len)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = rows < q_len
        d = tl.arange(0, DP2)
        dv = tl.arange(0, DVP2)
        q_token = (q_start + rows).to(tl.int64)
        q_at = Q + batch * stride_qb + head * stride_qh
        q = tl.load(
            q_at + q_token[:, None] * stride_qs + d[None, :] * stride_qd,
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        k_at = K + batch * stride_kb + kv_head * stride_kh
        v_at = V + batch * stride_vb + kv_head * stride_vh
        mask_at = Mask
        if MASK != 0:
            mask_at = Mask + batch * stride_mb + head * stride_mh
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DVP2], tl.float32)
        stop = pid * 0 + kv_len
        if CAUSAL:
            stop = tl.minimum(stop, tl.maximum(block * BLOCK_M + BLOCK_M + causal_offset, 0))
        for start in range(0, stop, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            token = (k_start + keys).to(tl.int64)
            real = keys < kv_len
            mask_value = keys
            if MASK != 0:
                mask_value = mask_of(mask_at, stride_mq, stride_mk, rows, keys, q_len, kv_len)
            k = tl.load(
                k_at + token[:, None] * stride_ks + d[None, :] * stride_kd,
                mask=real[:, None] & (d < D)[None, :],
                other=0.0,
            )
            # tf32 would cost the accuracy that this kernel is for.
            s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
            s = s * factor
            if SOFTCAP:
                s = cap_log2 * tanh(s / cap_log2)
            seen = seen_by_position(rows, keys, kv_len, causal_offset, window, CAUSAL, WINDOW)
            s = masked(s, seen, mask_value, MASK)
            m_new = tl.maximum(m, tl.max(s, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - base[:, None])
            decay = tl.math.exp2(m - base)
            l = l * decay + tl.sum(p, 1)
            any_row = tl.max((s > float("-inf")).to(tl.int32), 0) != 0
            v = tl.load(
                v_at + token[:, None] * stride_vs + dv[None, :] * stride_vd,
                mask=(real & any_row)[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            acc = acc * decay[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
            m = m_new
        if SINKS:
            sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
            top = tl.maximum(m, sink)
            safe = tl.where(top == float("-inf"), 0.0, top)
            decay = tl.math.exp2(m - safe)
            l = l * decay + tl.math.exp2(sink - safe)
            acc = acc * decay[:, None]
            m = top
        empty = l == 0.0
        out = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, l)[:, None])
        keep = inside[:, None] & (dv < DV)[None, :]
        out = out.to(Out.dtype.element_ty)
        infinite = ~(tl.abs(out.to(tl.float32)) < float("inf"))
        bad = tl.max(tl.max((keep & infinite).to(tl.int32), 1), 0)
        tl.atomic_max(Flags + 1, bad, mask=bad != 0)
        out_at = Out + batch * stride_ob + head * stride_oh
        tl.store(
            out_at + q_token[:, None] * stride_os + dv[None, :],
            out,
            mask=keep,
        )
        if LSE:
            lse = tl.where(
                empty, float("-inf"), (m + tl.math.log2(tl.where(empty, 1.0, l))) / LOG2E
            )
            tl.store(Lse + row_of_heads * total_q + q_token, lse, mask=inside)


@triton.jit
def flag_non_finite(
    Out,
    Flags,
    heads,
    rows,
    stride_b,
    stride_h,
    stride_s,
    DV: tl.constexpr,
    DVP2: tl.constexpr,
    ROWS: tl.constexpr,
):
    blocks = tl.cdiv(rows, ROWS)
    pid = tl.program_id(0)
    row_of_heads = (pid // blocks).to(tl.int64)
    row = pid % blocks * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, DVP2)
    at = Out + row_of_heads // heads * stride_b + row_of_heads % heads * stride_h
    keep = (row < rows)[:, None] & (dv < DV)[None, :]
    x = tl.load(at + row.to(tl.int64)[:, None] * stride_s + dv[None, :], mask=keep, other=0.0)
    bad = tl.max(tl.max((~(tl.abs(x.to(tl.float32)) < float("inf"))).to(tl.int32), 1), 0)
    tl.atomic_max(Flags, bad, mask=bad != 0)


def guard(flags: Tensor, call: Call, out: Tensor, lse: Tensor | None) -> None:
    """Behind a kernel that raises no flag of its own: raise flags[0] where `out` is not finite, and
    overwrite it as `run_where` does. Reads `out` once more.
    """
    B, Hq, Sq, Dv = out.shape
    if out.numel() == 0:
        return
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        flag_non_finite[(B * Hq * -(-Sq // 64),)](
            out, flags, Hq, Sq, *out.stride()[:3], DV=Dv, DVP2=triton.next_power_of_2(Dv), ROWS=64
        )
        run_where(flags, call, out, lse)


def links_where(flags: Tensor, call: Call, out: Tensor, lse: Tensor | None) -> list[Link] | None:
    """What `run_where` launches, which it does, as links behind the launches of a call's own; None
    where they cannot be.
    """
    call = apart(call)
    recording = Recording()
    run_where(flags, call, out, lse, recording)
    found = links_of(recording, tensors_of(call, out, lse, flags))
    if found is None:
        return None
    links, scratch_bytes = found
    assert scratch_bytes == 0
    return links


def run_where(
    flags: Tensor,
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    recording: Recording | None = None,
) -> None:
    """Overwrite `out` and `lse` with exact attention where flags[0] is up on the device.

    Accumulates in fp32 from the inputs as they are; flags[1] goes up when even that is not finite.
    """
    if out.numel() == 0 or call.k.shape[2] == 0:
        return
    B, Hq, Sq, D = call.q.shape
    Hkv, Skv, Dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    mask, kind = call.attn_mask, 0
    if mask is not None:
        kind = 1 if mask.dtype == torch.bool else 2
        mask = mask.view(torch.uint8) if kind == 1 else mask
        mask = mask.expand(B, Hq, Sq, Skv)
    members = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1
    m_blocks = Sq // BLOCK_M + members if call.packed else -(-Sq // BLOCK_M)
    launch(
        exact_where,
        B * Hq * m_blocks,
        (
            flags,
            call.q,
            call.k,
            call.v,
            mask,
            None if call.sinks is None else call.sinks.contiguous(),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            out,
            lse,
            call.scale * LOG2E.value,
            0.0 if call.softcap is None else call.softcap * LOG2E.value,
            Hq,
            Hq // Hkv,
            members,
            Sq,
            Skv,
            m_blocks,
            *call.q.stride(),
            *call.k.stride(),
            *call.v.stride(),
            *out.stride()[:3],
            *((0, 0, 0, 0) if mask is None else mask.stride()),
            *plain_positions(call),
        ),
        {
            "MASK": kind,
            "CAUSAL": call.causal_offset is not None,
            "WINDOW": call.causal_offset is not None and call.window is not None,
            "SOFTCAP": call.softcap is not None,
            "SINKS": call.sinks is not None,
            "PACKED": call.packed,
            "LSE": lse is not None,
            "D": D,
            "DV": Dv,
            "DP2": max(16, triton.next_power_of_2(D)),
            "DVP2": max(16, triton.next_power_of_2(Dv)),
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        },
        recording,
        num_warps=4,
        num_stages=1,
    )
