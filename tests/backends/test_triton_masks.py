"""Masks on the Triton kernels: kinds, broadcasts, rows that see nothing, bytes that nobody may
read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_contract import what_a_mask_adds_is_as_in_sdpa
from triton_support import DEVICE, DTYPE, ON_GPU, check, make, needs_kernels, tensors

pytestmark = needs_kernels

from sagepatch.backends.triton import attention  # noqa: E402
from sagepatch.backends.triton.masks import live_tiles  # noqa: E402
from sagepatch.numerics.recipe import RECIPES  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

NAMES = ["sage2_8", "sage2_8b_k128", "sage1_t", "sage1_vb", "sage2_4"]
recipes = pytest.mark.parametrize(
    "recipe", [RECIPES[n] for n in (NAMES if ON_GPU else NAMES[:2])], ids=lambda r: r.name
)


def _random_mask(shape, seed=3, keep=0.7):
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=gen) < keep).to(DEVICE)


# case 19: shapes of bool masks
@pytest.mark.parametrize(
    "shape", [(70, 200), (2, 1, 1, 200), (1, 4, 70, 200), (2, 4, 70, 200), (1, 4, 1, 200)], ids=str
)
@recipes
def test_bool_masks_of_every_shape(recipe, shape):
    check(make((2, 4, 2, 70, 200, 64), attn_mask=_random_mask(shape)), recipe)


@pytest.mark.parametrize("value", [float("-inf"), "min"], ids=str)
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
@recipes
def test_additive_masks_hide_as_bool_ones_do(recipe, value, dtype):
    low = torch.finfo(dtype).min if value == "min" else value
    keep = _random_mask((70, 200))
    bias = torch.zeros(70, 200, device=DEVICE, dtype=dtype).masked_fill(~keep, low)
    call = make((2, 4, 2, 70, 200, 64), attn_mask=bias)
    out, _ = check(call, recipe)
    by_bool, _ = attention.run(replace(call, attn_mask=keep), recipe)
    torch.testing.assert_close(out.float(), by_bool.float(), rtol=0.1, atol=0.03)


@recipes
def test_a_bias_is_added(recipe):
    ramp = torch.arange(200, device=DEVICE, dtype=torch.float32)[None, :] - 100
    slopes = torch.tensor([0.1, 0.01, -0.05, 0.5], device=DEVICE).view(1, 4, 1, 1)
    check(make((2, 4, 2, 70, 200, 64), attn_mask=(ramp * slopes)), recipe)


@recipes
def test_what_is_no_number_in_a_mask_spoils_its_row(recipe):
    what_a_mask_adds_is_as_in_sdpa(attention.run, make((1, 2, 1, 140, 140, 64)), recipe)


@recipes
def test_stride_0_masks(recipe):
    keep = _random_mask((2, 1, 1, 200)).expand(2, 4, 70, 200)
    check(make((2, 4, 2, 70, 200, 64), attn_mask=keep), recipe)


# case 18: a row that sees nothing
@recipes
def test_rows_with_every_key_masked(recipe):
    call = make((1, 2, 2, 4, 8, 64))
    keep = torch.ones(4, 8, dtype=torch.bool, device=DEVICE)
    keep[1] = False
    inf = torch.zeros(4, 8, device=DEVICE).masked_fill(~keep, float("-inf"))
    lowest = torch.zeros(4, 8, device=DEVICE).masked_fill(~keep, torch.finfo(torch.float32).min)
    for mask in (keep, inf):
        out, lse = check(replace(call, attn_mask=mask), recipe)
        assert not out[:, :, 1].any()
        assert bool((lse[:, :, 1] == float("-inf")).all())
    out, _ = check(replace(call, attn_mask=lowest), recipe)
    mean = call.v.float().mean(2)
    torch.testing.assert_close(out[:, :, 1].float(), mean, rtol=0.05, atol=0.05)


PADDINGS = {
    "prefix": [slice(0, 90)],
    "gap": [slice(0, 20), slice(150, 300)],
    "suffix": [slice(140, 300)],
    "none": [],
    "all": [slice(0, 300)],
}


# case 20, and masked keys may hold any bytes
@pytest.mark.parametrize("kind", PADDINGS)
@recipes
def test_hidden_keys_hold_any_bytes(recipe, kind):
    keep = torch.zeros(2, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    for part in PADDINGS[kind]:
        keep[:, :, :, part] = True
    keep[1, ..., :7] = True
    call = make((2, 4, 2, 70, 300, 64), attn_mask=keep)
    out, lse = check(call, recipe)
    k, v = call.k.clone(), call.v.clone()
    hidden = ~keep[:, 0, 0]
    for t in (k, v):
        t.transpose(1, 2)[hidden] = float("nan")
    dirty, dirty_lse = attention.run(replace(call, k=k, v=v, return_lse=True), recipe)
    assert torch.equal(out, dirty)
    assert torch.equal(lse, dirty_lse)


@recipes
def test_keys_that_no_query_sees_are_padding_in_any_mask(recipe):
    keep = _random_mask((1, 1, 70, 200))
    keep[..., 60:160] = False
    call = make((1, 2, 2, 70, 200, 64), attn_mask=keep)
    k, v = call.k.clone(), call.v.clone()
    k[:, :, 60:160], v[:, :, 60:160] = float("nan"), float("nan")
    out, _ = attention.run(call, recipe)
    dirty, _ = attention.run(replace(call, k=k, v=v), recipe)
    assert torch.equal(out, dirty)


@pytest.mark.parametrize("offset", [0, 130])
@recipes
def test_masks_with_causal_and_window(recipe, offset):
    base = make((2, 2, 2, 70, 200, 64), causal_offset=offset, window=90)
    for mask in (_random_mask((2, 1, 1, 200)), _random_mask((70, 200))):
        check(replace(base, attn_mask=mask), recipe)


def test_dead_tiles_are_left_out():
    keep = torch.zeros(1, 1, 256, 512, dtype=torch.bool, device=DEVICE)
    keep[..., :128, :128] = True
    keep[..., 128:, 256:300] = True
    q, k, v = tensors(1, 2, 2, 256, 512, 64)
    live = live_tiles(Call(q, k, v, 1.0, attn_mask=keep), 64, 64)
    assert live is not None
    assert live.counts.tolist() == [[2, 0], [2, 0], [0, 1], [0, 1]]
    assert live.tiles[:2, :2].tolist() == [[0, 1], [0, 1]]
    assert live.tiles[2:, -1].tolist() == [4, 4]
    assert live.seen.ne(0).sum() == 128 + 44
