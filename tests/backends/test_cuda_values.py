"""The Hopper kernel that reads V as the caller gave it, scores under and over its cap, and blocks
of few queries.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from attention_calls import poison
from cuda_support import DEVICE, check, is_shared, make, needs_hopper

from sagepatch.backends import prepared
from sagepatch.backends.cuda import attention
from sagepatch.numerics.recipe import RECIPES

# Recipes whose V needs no code, in the dtype that they take as it is.
AS_IT_IS = [("sage2_8_bf16", torch.bfloat16), ("sage1_b_f32", torch.float16)]
as_it_is = pytest.mark.parametrize(("name", "dtype"), AS_IT_IS, ids=lambda x: str(x))


def copied(call, recipe, monkeypatch):
    """The output of the same call with V copied by the pre-pass."""
    with monkeypatch.context() as patched:
        patched.setattr(attention, "raw_value_strides", lambda *facts: None)
        patched.setattr(prepared, "_PREPARED", {})
        poison(call)
        return attention.run(call, recipe)[0]


@needs_hopper
@pytest.mark.parametrize("order", ["bhsd", "bshd", "one tensor"])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 2, 333, 700, 128), (1, 3, 3, 65, 129, 64), (2, 2, 1, 200, 1000, 128, 80),
     (1, 2, 2, 130, 300, 64, 40), (1, 2, 2, 130, 300, 192)],
    ids=str,
)  # fmt: skip
@as_it_is
def test_values_that_are_not_copied_give_the_same_to_the_bit(
    name, dtype, shape, order, monkeypatch
):
    recipe = RECIPES[name]
    call = make(shape, dtype=dtype)
    B, H, S, D = call.v.shape
    if order == "bshd":
        call = replace(call, v=call.v.transpose(1, 2).contiguous().transpose(1, 2))
    elif order == "one tensor":
        # K and V of a token side by side, as a fused projection leaves them; NaN around.
        both = torch.full((B, S + 3, 2, H, D), float("nan"), dtype=dtype, device=DEVICE)
        v = both[:, 1 : S + 1, 1].transpose(1, 2)
        v.copy_(call.v)
        call = replace(call, v=v)
    assert attention.raw_value_strides(call, recipe) is not None
    for options in ({}, {"causal_offset": 60}, {"causal_offset": 60, "window": 200}):
        asked = replace(call, **options)
        out = check(asked, recipe)
        assert torch.equal(out, copied(asked, recipe, monkeypatch))


@needs_hopper
@as_it_is
def test_values_that_must_be_copied(name, dtype):
    recipe = RECIPES[name]
    call = make((2, 4, 2, 200, 300, 64), dtype=dtype)
    expected, _ = attention.run(call, recipe)
    odd = torch.empty(2, 2, 300, 65, dtype=dtype, device=DEVICE)[..., 1:]
    odd.copy_(call.v)
    one = call.v[:1].expand_as(call.v)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    assert attention.raw_value_strides(call, recipe)
    assert attention.raw_value_strides(replace(call, v=odd), recipe) is None
    assert attention.raw_value_strides(replace(call, v=one), recipe) is None
    assert attention.raw_value_strides(replace(call, attn_mask=mask), recipe) is None
    assert attention.raw_value_strides(replace(call, v=call.v.float()), recipe) is None
    assert attention.raw_value_strides(call, RECIPES["sage1_b"]) is None
    assert attention.raw_value_strides(call, RECIPES["sage2_8"]) is None
    assert torch.equal(attention.run(replace(call, v=odd), recipe)[0], expected)
    assert torch.equal(attention.run(replace(call, attn_mask=mask), recipe)[0], expected)


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
