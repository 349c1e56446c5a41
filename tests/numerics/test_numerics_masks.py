"""One mask from many: what is folded together, cut to a tile, and counted as padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from numerics_support import normal

from sagepatch.numerics.masks import merged_mask, out_of_sight, seen_keys
from sagepatch.spec import Call

SQ, SKV = 13, 17


def brute(call: Call) -> torch.Tensor:
    """[B, Hq, Sq, Skv] of what is added to each score."""
    added = torch.zeros(2, 3, SQ, SKV)
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(2, 3, SQ, SKV)
        added = added.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask + added
    for i in range(SQ):
        for j in range(SKV):
            if call.causal_offset is None:
                continue
            hidden = j > i + call.causal_offset
            hidden |= call.window is not None and j <= i + call.causal_offset - call.window
            if hidden:
                added[:, :, i, j] = -math.inf
    return added


KEEP = torch.rand(2, 3, SQ, SKV, generator=torch.Generator().manual_seed(0)) > 0.5
BIAS = torch.randn(1, 3, SQ, SKV, generator=torch.Generator().manual_seed(1))
MASKS = {
    "none": None,
    "bool": KEEP,
    "bool by key": KEEP[:, :1, :1],
    "bool by query": KEEP[:1, :, :, :1],
    "bias": BIAS,
    "bias by key": BIAS[0, 0, 0],
}
POSITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal_offset": 0},
    {"causal_offset": 4},
    {"causal_offset": -5},
    {"causal_offset": 40},
    {"causal_offset": 4, "window": 3},
    {"causal_offset": 0, "window": 100},
)


@pytest.mark.parametrize("position", POSITIONS, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_every_tile_of_the_merged_mask_is_right(kind: str, position: dict[str, Any]) -> None:
    call = normal(2, 3, 3, SQ, SKV, 4, attn_mask=MASKS[kind], **position)
    want = brute(call)
    for start, stop, first, last in ((0, SQ, 0, SKV), (3, 7, 5, 9), (12, 13, 0, 1), (0, 1, 16, 17)):
        part = want[:, :, start:stop, first:last]
        got = merged_mask(call, start, stop, first, last)
        if got is None:
            added = torch.zeros_like(part)
        elif got.dtype == torch.bool:
            added = torch.zeros_like(part).masked_fill(~got, -math.inf)
        else:
            added = got.expand(part.shape)
        assert torch.equal(added, part)
        skipped = out_of_sight(call, start, stop, first, last)
        positional = brute(replace(call, attn_mask=None))[:, :, start:stop, first:last]
        assert skipped == bool(positional.isneginf().all())
    whole = merged_mask(call)
    assert (whole is None) == (kind == "none" and not want.any())


def test_padding_is_what_no_query_and_no_head_sees() -> None:
    keep = KEEP.clone()
    keep[0, ..., 4], keep[1, ..., 9] = False, False
    keep[0, ..., 7], keep[1, ..., 8] = False, False
    keep[0, 2, 5, 7], keep[1, 1, 0, 8] = True, True  # one row of one head
    call = normal(2, 3, 3, SQ, SKV, 4)
    for mask in (keep, torch.zeros(keep.shape).masked_fill(~keep, -math.inf)):
        seen = seen_keys(replace(call, attn_mask=mask))
        assert seen is not None
        assert torch.equal(seen, keep.any(2).any(1))
        assert seen[:, [4, 9]].tolist() == [[False, True], [True, False]]
        assert seen[0, 7]
        assert seen[1, 8]
    lowest = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    seen = seen_keys(replace(call, attn_mask=lowest))
    assert seen is not None
    assert seen.all()  # a very low number is still a weight
    assert seen_keys(call) is None
    assert seen_keys(replace(call, causal_offset=-3)) is None


# Once wrong: sums of int64 tensors wrapped, and keys in sight were hidden.
@pytest.mark.parametrize("window", [None, 1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("offset", [2**63 - 1, 2**63 - 5, -(2**63), -(2**63) + 3, 2**40, 4])
def test_positions_near_the_end_of_int64_hide_and_show_the_same(
    offset: int, window: int | None
) -> None:
    call = normal(2, 3, 3, SQ, SKV, 4, causal_offset=offset, window=window)
    got = merged_mask(call)
    added = torch.zeros(2, 3, SQ, SKV)
    if got is not None:
        added = added.masked_fill(~got, -math.inf)
    assert torch.equal(added, brute(call))
