"""Exact attention in plain torch, up to FP64, with every option of a call: the yardstick of all the
rest. It quantises nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from sagepatch.numerics.masks import merged_mask, seen_keys
from sagepatch.spec import Call

# Scores held at once, in elements: queries are tiled so that memory stays flat however long the
# call.
SCORE_BUDGET = 1 << 22


def exact(call: Call, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Softmax attention computed in `dtype`, differentiable in q, k, v, mask and sinks.

    Returns the output [B, Hq, Sq, Dv] in `dtype` and the natural log-sum-exp of the scores [B, Hq,
    Sq] in fp32 (fp64 under fp64). A row that sees no key gives 0 and -inf, as SDPA does. A key that
    a mask hides from every query is never read, whatever bytes it holds. Sinks count in the
    log-sum-exp.
    """
    if call.packed:
        return joined([exact(member, dtype) for member in members(call)])
    B, Hq, Sq, _ = call.q.shape
    k, v = call.k.to(dtype).contiguous(), call.v.to(dtype).contiguous()
    seen = seen_keys(call)
    if seen is not None:
        keep = seen[:, None, :, None]
        k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
    rows = max(1, SCORE_BUDGET // max(1, B * Hq * call.k.shape[2]))
    with no_autocast(call.q.device):
        return joined(
            [
                _rows(call, k, v, start, min(start + rows, Sq), dtype)
                for start in range(0, max(Sq, 1), rows)
            ]
        )


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products keep the dtype of their operands."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def members(call: Call) -> list[Call]:
    """The members of a packed call, each a call of its own."""
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_kv is not None
    ends_q, ends_kv = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
    return [
        replace(
            call,
            q=call.q[:, :, ends_q[i] : ends_q[i + 1]],
            k=call.k[:, :, ends_kv[i] : ends_kv[i + 1]],
            v=call.v[:, :, ends_kv[i] : ends_kv[i + 1]],
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
        )
        for i in range(len(ends_q) - 1)
    ]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One pair (output, log-sum-exp) from pairs that follow one another along the queries."""
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _rows(
    call: Call, k: Tensor, v: Tensor, start: int, stop: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q = call.q[:, :, start:stop].to(dtype)
    B, Hq, Sq, D = q.shape
    Hkv, Skv, Dv = v.shape[1], v.shape[2], v.shape[3]
    stacked = Hq // Hkv * Sq
    scores = (q.reshape(B, Hkv, stacked, D) @ k.mT).view(B, Hq, Sq, Skv) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = merged_mask(call, start, stop)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else _biased(scores, mask)
    if call.sinks is not None:
        sink = call.sinks.to(dtype).view(1, Hq, 1, 1).expand(B, Hq, Sq, 1)
        scores = torch.cat([scores, sink], 3)
    if scores.shape[3] == 0:
        lse = q.new_full((B, Hq, Sq), -torch.inf)
        return q.new_zeros(B, Hq, Sq, Dv), lse if dtype == torch.float64 else lse.float()
    m = scores.detach().amax(3, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = torch.exp(scores - m)
    total = weights.sum(3, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    weights = (weights / total)[..., :Skv].reshape(B, Hkv, stacked, Skv)
    out = (weights @ v).view(B, Hq, Sq, Dv)
    lse = (m + torch.log(total)).masked_fill(empty, -torch.inf).squeeze(3)
    # A select, not a product: a row that sees nothing gives 0 even where V holds NaN.
    return out.masked_fill(empty, 0.0), lse if dtype == torch.float64 else lse.float()


def _biased(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores plus an additive mask; only -inf in the mask hides a key, a sum that overflows does
    not.
    """
    lowest = torch.finfo(scores.dtype).min
    biased = (scores + mask.to(scores.dtype).clamp(min=lowest)).clamp(min=lowest)
    return biased.masked_fill(mask == -torch.inf, -torch.inf)
