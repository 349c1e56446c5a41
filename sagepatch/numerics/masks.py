"""Masks of a call as tensors: which keys a row sees, what is added to its scores, which keys nobody
sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagepatch.spec import Call


def merged_mask(call: Call, start: int = 0, stop: int | None = None) -> Tensor | None:
    """Fold `attn_mask`, `causal_offset` and `window` into one mask of query rows start to stop.

    Bool (True keeps) or floating point (added, -inf hides), broadcastable to [B, Hq, stop - start,
    Skv]; None where every row sees every key.
    """
    stop = call.q.shape[2] if stop is None else stop
    mask = _rows_of(call.attn_mask, start, stop)
    visible = _visible(call, start, stop)
    if visible is None:
        return mask
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, -torch.inf)


def seen_keys(call: Call) -> Tensor | None:
    """Keys that at least one query of the batch member may see by `attn_mask`, [B, Skv] bool; None
    for all.

    Only what a mask hides outright counts (False, or -inf): such keys are padding, and their bytes
    may be anything.
    """
    mask = call.attn_mask
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask != -torch.inf
    B, Skv = call.k.shape[0], call.k.shape[2]
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.any(2).any(1).expand(B, Skv)


def _rows_of(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., start:stop, :]


def _visible(call: Call, start: int, stop: int) -> Tensor | None:
    if call.causal_offset is None:
        return None
    device = call.q.device
    last = torch.arange(start, stop, device=device)[:, None] + call.causal_offset
    key = torch.arange(call.k.shape[2], device=device)[None, :]
    visible = key <= last
    return visible if call.window is None else visible & (key > last - call.window)
