"""Masks of a call as tensors: which keys a row sees, what is added to its scores, which keys nobody
sees. Knows nothing of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagepatch.spec import Call


def merged_mask(
    call: Call,
    start: int = 0,
    stop: int | None = None,
    first_key: int = 0,
    last_key: int | None = None,
) -> Tensor | None:
    """Fold `attn_mask`, `causal_offset` and `window` into one mask of query rows start to stop and
    keys first_key to last_key (exclusive ends).

    Bool (True keeps) or floating point (added, -inf hides), broadcastable to [B, Hq, rows, keys];
    None where every one of these rows sees every one of these keys.
    """
    stop = call.q.shape[2] if stop is None else stop
    last_key = call.k.shape[2] if last_key is None else last_key
    mask = _cut(_cut(call.attn_mask, -2, start, stop), -1, first_key, last_key)
    visible = _visible(call, start, stop, first_key, last_key)
    if visible is None:
        return mask
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return mask.masked_fill(~visible, -torch.inf)


def out_of_sight(call: Call, start: int, stop: int, first_key: int, last_key: int) -> bool:
    """Whether position alone (`causal_offset`, `window`) hides all these keys from all these rows,
    so that a kernel skips the tile.
    """
    if call.causal_offset is None:
        return False
    if first_key > stop - 1 + call.causal_offset:
        return True
    return call.window is not None and last_key - 1 <= start + call.causal_offset - call.window


def seen_keys(call: Call) -> Tensor | None:
    """Keys that at least one query of the batch member may see by `attn_mask`, [B, Skv] bool; None
    for all.

    Only what a mask hides outright counts (False, or -inf): such keys are padding, and their bytes
    may be anything. Keys hidden by position are real tokens and stay in means and scales.
    """
    mask = call.attn_mask
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        mask = mask != -torch.inf
    B, Skv = call.k.shape[0], call.k.shape[2]
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.any(2).any(1).expand(B, Skv)


def _cut(mask: Tensor | None, axis: int, first: int, last: int) -> Tensor | None:
    """Elements first to last of `axis`, all of it where that axis is broadcast."""
    if mask is None or mask.dim() < -axis or mask.shape[axis] == 1:
        return mask
    return mask.narrow(axis, first, last - first)


def _visible(call: Call, start: int, stop: int, first_key: int, last_key: int) -> Tensor | None:
    if call.causal_offset is None:
        return None
    offset, window = call.causal_offset, call.window
    below = last_key - 1 <= start + offset
    inside = window is None or first_key > stop - 1 + offset - window
    if below and inside:
        return None
    # Beyond all rows and keys a position hides and shows the same wherever it is, and sums of int64
    # tensors wrap: the number goes to that end first.
    most = call.q.shape[2] + call.k.shape[2] + 1
    near = max(-most, min(most, offset))
    row = torch.arange(start, stop, device=call.q.device)[:, None]
    key = torch.arange(first_key, last_key, device=call.q.device)[None, :]
    visible = key <= row + near
    if window is None:
        return visible
    edge = max(-most, min(most, offset - window))
    return visible & (key > row + edge)
