"""The Hopper kernel that reads V as the caller gave it, scores under and over its cap, and blocks
of few queries.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_support import DEVICE, check, is_shared, make, needs_hopper

from sagepatch.numerics.recipe import RECIPES


@needs_hopper
@pytest.mark.parametrize("most", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_far_over_those_of_the_first_tile(dim, most):
    """Below, about at and far over the cap under which the kernel takes no maxima."""
    recipe = RECIPES["sage2_8_bf16"]
    call = make((1, 4, 2, 200, 1500, dim))
    k = torch.randn(call.k.shape, generator=torch.Generator().manual_seed(7)).to(call.k)
    grown = k * torch.linspace(0.05, most, 1500, device=DEVICE, dtype=k.dtype)[:, None]
    out = check(replace(call, k=grown), recipe)
    assert out.isfinite().all()
    check(replace(call, k=grown, causal_offset=1300), recipe)
    # Members of a packed call: the second one's keys say nothing of the first.
    ends = torch.tensor([0, 90, 200], dtype=torch.int32, device=DEVICE)
    keys = torch.tensor([0, 700, 1500], dtype=torch.int32, device=DEVICE)
    swapped = torch.cat([grown[:, :, 800:], grown[:, :, :800]], 2)
    for packed in (grown, swapped):
        check(replace(call, k=packed, cu_seqlens_q=ends, cu_seqlens_kv=keys), recipe)


# Heads and queries: whole blocks of 192 and shorter last ones, whose warpgroups without rows idle.
BLOCKS = [(160, 200), (150, 320), (300, 100), (67, 384), (131, 193), (132, 400), (40, 1000)]


@needs_hopper
@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["sage2_8_bf16", "sage2pp_8_d4", "sage1_b"])
def test_blocks_of_few_rows(name, sizes):
    heads, queries = sizes
    call = make((1, heads, heads, queries, 130, 128))
    check(call, RECIPES[name], shared=is_shared(call, RECIPES[name]))
    check(replace(call, causal_offset=0), RECIPES[name])
