"""Parts of calls give the rows and heads that the whole call gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.layers import call

from sagepatch.calibration.pieces import one_head, rows_of, spans, taken
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.exact import exact
from sagepatch.numerics.recipe import RECIPES

PARTS = [(0, 128), (256, 384)]
MASKS = {
    "none": None,
    "keys": torch.rand(1, 1, 1, 400) > 0.2,
    "rows": torch.rand(1, 1, 400, 400) > 0.2,
    "heads": torch.rand(2, 4, 400, 400) > 0.2,
    "added": torch.randn(400, 400),
    "added to keys": torch.randn(400),
}


def long(**options):
    return call(B=2, H=4, Sq=400, Skv=400, D=16, **options)


def test_spans_reach_from_the_first_rows_to_about_the_last() -> None:
    assert spans(300, 3, 128) == [(0, 300)]
    assert spans(384, 3, 128) == [(0, 384)]
    assert spans(1056, 3, 128) == [(0, 128), (384, 512), (896, 1024)]
    assert spans(500, 2, 100) == [(0, 100), (384, 484)]
    assert spans(1000, 1, 100) == [(0, 100)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", [{}, {"causal_offset": 0}, {"causal_offset": 3, "window": 50}])
def test_rows_of_a_call_are_those_of_the_whole(mask: str, position) -> None:
    whole = long(attn_mask=MASKS[mask], **position)
    want = taken(exact(whole)[0], PARTS)
    got, _ = exact(rows_of(whole, PARTS))
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


def test_all_rows_are_the_call_itself() -> None:
    whole = long()
    assert rows_of(whole, [(0, 400)]) is whole


@pytest.mark.parametrize("recipe", ["sage2_8", "sage1_b", "sage2_4"])
def test_codes_of_whole_blocks_are_those_of_the_whole(recipe: str) -> None:
    whole = long()
    want = taken(emulate(whole, RECIPES[recipe])[0], PARTS)
    got, _ = emulate(rows_of(whole, PARTS), RECIPES[recipe])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_a_head_reads_its_own_key_head(mask: str) -> None:
    whole = long(attn_mask=MASKS[mask], sinks=torch.randn(4))
    grouped = replace(whole, k=whole.k[:, :2], v=whole.v[:, :2])
    want, _ = exact(grouped)
    for head in range(4):
        got, _ = exact(one_head(grouped, head))
        torch.testing.assert_close(got, want[:, head : head + 1])
