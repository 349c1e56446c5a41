"""Parts of a call that are calls of their own: some of its query rows, one of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sagepatch.numerics.masks import merged_mask
from sagepatch.spec import Call

# Spans of rows start at multiples of this, where blocks of Q's scales start in every recipe that
# has blocks: so a row has the same codes as in the whole call.
BLOCK = 128


def spans(length: int, runs: int, rows: int) -> list[tuple[int, int]]:
    """Up to `runs` spans of `rows` rows each, from the first row to about the last; all rows where
    they are as many.

    >>> spans(1056, 3, 128)
    [(0, 128), (384, 512), (896, 1024)]
    """
    if length <= runs * rows:
        return [(0, length)]
    last = length - rows
    starts = {last * run // max(1, runs - 1) // BLOCK * BLOCK for run in range(runs)}
    return [(start, start + rows) for start in sorted(starts)]


def rows_of(call: Call, parts: Sequence[tuple[int, int]]) -> Call:
    """Some spans of query rows of a call that is not packed as one call over all its keys."""
    if list(parts) == [(0, call.q.shape[2])]:
        return call
    masks = [merged_mask(call, start, stop) for start, stop in parts]
    return replace(
        call,
        q=taken(call.q, parts),
        attn_mask=_joined(masks, parts, call),
        causal_offset=None,
        window=None,
    )


def taken(x: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """These spans of rows of x [B, H, S, D], one after the other."""
    return torch.cat([x[:, :, start:stop] for start, stop in parts], 2)


def _joined(
    masks: Sequence[Tensor | None], parts: Sequence[tuple[int, int]], call: Call
) -> Tensor | None:
    """The masks of spans of rows, one after the other; None where nothing is hidden or added."""
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    if known[0].dim() < 2 or (call.causal_offset is None and known[0].shape[-2] == 1):
        # The same for every row.
        return known[0]
    keys = call.k.shape[2]
    whole = torch.ones((), dtype=torch.bool, device=call.q.device)
    rows = []
    for mask, (start, stop) in zip(masks, parts, strict=True):
        one = whole if mask is None else mask
        if known[0].dtype != torch.bool and one.dtype == torch.bool:
            one = torch.zeros_like(one, dtype=known[0].dtype).masked_fill(~one, -torch.inf)
        one = one[(None,) * (4 - one.dim())]
        rows.append(one.expand(*one.shape[:2], stop - start, keys))
    most = max(rows, key=lambda one: one.shape[0] * one.shape[1]).shape[:2]
    return torch.cat([one.expand(*most, *one.shape[2:]) for one in rows], 2)


def one_head(call: Call, head: int) -> Call:
    """One query head of a call and the key head that it reads."""
    read = head // (call.q.shape[1] // call.k.shape[1])
    mask = call.attn_mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] != 1:
        mask = mask[..., head : head + 1, :, :]
    return replace(
        call,
        q=call.q[:, head : head + 1],
        k=call.k[:, read : read + 1],
        v=call.v[:, read : read + 1],
        attn_mask=mask,
        sinks=None if call.sinks is None else call.sinks[head : head + 1],
        bshd_out=False,
        return_lse=False,
    )
