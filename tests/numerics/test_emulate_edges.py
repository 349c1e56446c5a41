"""Where kernels went wrong for people: masks, padding, NaN, numbers beyond a format, silence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends.kernel_contract import what_a_mask_adds_is_as_in_sdpa
from numerics_support import (
    bound,
    check,
    eight_bit_recipes,
    every_recipe,
    normal,
    sample_recipes,
)

from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, SAGE1_B, SAGE2_8, SAGE2PP_8, Recipe
from sagepatch.spec import Call

LOWEST = torch.finfo(torch.float32).min
EXACT = RECIPES["exact"]


def masks() -> dict[str, torch.Tensor]:
    keep = torch.rand(2, 3, 130, 300, generator=torch.Generator().manual_seed(2)) > 0.3
    keep[0, 1, 4] = False  # a row that sees nothing
    padding = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    padding[0, ..., 211:], padding[1, ..., 40:60] = False, False
    return {
        "bool": keep,
        "bool one head": keep[:, :1],
        "bool stride 0": keep[:1, :1].expand(2, 3, 130, 300),
        "key padding": padding,
        "two dimensional": keep[0, 0],
        "one column": keep[:, :, :, :1],
        "minus inf": torch.zeros(2, 3, 130, 300).masked_fill(~keep, -math.inf),
        "minus inf fp16": torch.zeros(2, 3, 130, 300).masked_fill(~keep, -math.inf).half(),
        "bias": -torch.arange(300.0).mul(0.01).expand(1, 3, 130, 300),
        "bias one row": torch.linspace(-3, 3, 300),
        "bias fp64": torch.linspace(-3, 3, 300).double().masked_fill(~keep[0, 0, 0], LOWEST),
        "0 and 1 as floats": keep.float(),
    }


# cases 19, 20
@pytest.mark.parametrize("kind", masks())
@sample_recipes
def test_masks(recipe: Recipe, kind: str) -> None:
    check(normal(attn_mask=masks()[kind]), recipe, 1.3 * bound(recipe))


# case 19
@sample_recipes
def test_one_mask_in_many_forms_gives_one_output(recipe: Recipe) -> None:
    call = normal(B=1, attn_mask=masks()["bool one head"][:1])
    keep = call.attn_mask
    assert keep is not None
    want = emulate(call, recipe)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        hiding = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -math.inf)
        got = emulate(replace(call, attn_mask=hiding), recipe)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        lowest = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
        out, _ = emulate(replace(call, attn_mask=lowest), recipe)
        rows = keep.any(3, keepdim=True).expand_as(out)
        torch.testing.assert_close(out[rows], want[0][rows], atol=2e-2, rtol=0)


# Once wrong: the emulator clamped +inf to a number.
@every_recipe
def test_what_is_no_number_in_a_mask_spoils_its_row_as_in_sdpa(recipe: Recipe) -> None:
    what_a_mask_adds_is_as_in_sdpa(emulate, normal(B=1, Sq=140, Skv=140), recipe)
    if recipe.exact:
        return
    call = normal(B=1, Sq=140, Skv=140)
    mask = torch.zeros(140, 140)
    mask[3, 7], mask[5, 9], mask[8, 2] = math.inf, math.nan, torch.finfo(mask.dtype).max
    want = F.scaled_dot_product_attention(call.q, call.k, call.v, mask).isnan()
    assert want.any(3).sum() == 2 * call.q.shape[1]
    for found in (exact, lambda one: emulate(one, recipe)):
        assert torch.equal(found(replace(call, attn_mask=mask))[0].isnan(), want)


# case 18
@eight_bit_recipes
def test_a_row_without_keys_is_as_in_sdpa(recipe: Recipe) -> None:
    call = normal(B=1, Hq=1, Sq=4, Skv=8)
    keep = torch.ones(1, 1, 4, 8, dtype=torch.bool)
    keep[0, 0, 1] = False
    hidden = torch.zeros(1, 1, 4, 8)
    for mask in (
        keep,
        hidden.masked_fill(~keep, -math.inf),
        hidden.masked_fill(~keep, LOWEST),
    ):
        want = F.scaled_dot_product_attention(call.q, call.k, call.v, mask)
        out, lse = emulate(replace(call, attn_mask=mask), recipe)
        torch.testing.assert_close(out, want, atol=0.08, rtol=0)
        exact_out, exact_lse = exact(replace(call, attn_mask=mask))
        torch.testing.assert_close(exact_out, want, atol=1e-5, rtol=0)
        nothing = mask.dtype == torch.bool or bool(mask[0, 0, 1, 0].isneginf())
        assert (lse[0, 0, 1] == -math.inf).item() is nothing
        assert (exact_lse[0, 0, 1] == -math.inf).item() is nothing
        assert (out[0, 0, 1] == 0).all().item() is nothing
    mean = call.v[0, 0].mean(0)
    torch.testing.assert_close(out[0, 0, 1], mean, atol=0.05, rtol=0)


@every_recipe
def test_a_row_of_the_lowest_number_is_the_mean_of_v_whatever_the_scores(recipe: Recipe) -> None:
    """Scores of either sign, over tiles of which each has another maximum."""
    call = normal(B=1, Hq=2, Sq=5, Skv=200)
    loud = replace(call, q=10 * call.q, attn_mask=torch.full((5, 200), LOWEST))
    out, _ = emulate(loud, recipe)
    want = call.v.mean(2, keepdim=True).expand_as(out)
    # Probabilities are all 1 and their codes exact: V's own codes are all that errs.
    assert compare(out, want).whole.rel_l1 < 0.05


# cases 18, 30
@sample_recipes
def test_keys_at_the_lowest_number_lose_against_any_other(recipe: Recipe) -> None:
    call = normal(B=1, Sq=30, Skv=150)
    bias = torch.zeros(150)
    bias[:100] = LOWEST
    out, _ = emulate(replace(call, attn_mask=bias), recipe)
    alone, _ = exact(replace(call, k=call.k[:, :, 100:], v=call.v[:, :, 100:]))
    assert compare(out, alone).worst.rel_l1 < 1.5 * bound(recipe)


# case 1
@every_recipe
def test_bytes_of_padding_never_reach_anything(recipe: Recipe) -> None:
    call = normal(Sq=60, Skv=200)
    padding = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    padding[0, ..., 150:], padding[1, ..., :30] = False, False
    hidden = ~padding.mT  # [2, 1, 200, 1]
    forms = (padding, torch.zeros(2, 1, 60, 200).masked_fill(~padding, -math.inf))
    clean = emulate(replace(call, attn_mask=padding), recipe)
    clean_exact = exact(replace(call, attn_mask=padding))[0]
    cut = replace(call, q=call.q[:1], k=call.k[:1, :, :150], v=call.v[:1, :, :150])
    alone = emulate(cut, recipe)
    torch.testing.assert_close(clean[0][:1], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(clean[1][:1], alone[1], atol=1e-5, rtol=1e-5)
    for bad in (math.nan, math.inf, 1e30):
        k, v = call.k.masked_fill(hidden, bad), call.v.masked_fill(hidden, bad)
        for mask in forms:
            dirty = emulate(replace(call, k=k, v=v, attn_mask=mask), recipe)
            assert torch.equal(dirty[0], clean[0])
            assert torch.equal(dirty[1], clean[1])
            dirty_exact = exact(replace(call, k=k, v=v, attn_mask=mask))[0]
            assert torch.equal(dirty_exact, clean_exact)


@every_recipe
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_and_seen_is_not_hidden(recipe: Recipe, where: str, bad: float) -> None:
    call = normal(Sq=40, Skv=70)
    getattr(call, where)[0, 0, 3, 2] = bad
    out, _ = emulate(call, recipe)
    assert not out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


# case 30
@every_recipe
def test_very_large_scores_stay_finite(recipe: Recipe) -> None:
    call = normal(B=1, Sq=60, Skv=200)
    for factor in (300.0, 1e4, 1e9):
        out, lse = emulate(replace(call, q=call.q * factor, k=call.k * factor), recipe)
        assert out.isfinite().all()
        assert lse.isfinite().all()
    constant = torch.full((1, 3, 60, 64), 1e4, dtype=torch.bfloat16)
    same = Call(constant, constant[:, :, :50], call.v[:, :, :50].bfloat16(), 0.125)
    out, _ = emulate(same, recipe)
    want = same.v.float().mean(2, keepdim=True).expand_as(out)
    assert compare(out, want).worst.rel_l1 < 0.05
    lowest = torch.full((60, 200), LOWEST)
    out, _ = emulate(replace(call, q=call.q * 1e18, k=call.k * 1e18, attn_mask=lowest), recipe)
    assert out.isfinite().all()


# case 30
@sample_recipes
def test_scores_beyond_fp32_still_have_a_winner(recipe: Recipe) -> None:
    """Products of scales would be infinite and every positive score the largest number, so that
    outputs would be means. Capped scales lose what told key groups apart, hence not every row.
    """
    call = normal(B=1, Sq=60, Skv=100)
    loud = replace(call, q=call.q * 1e30, k=call.k * 1e30)
    out, _ = emulate(loud, replace(recipe, name="x", smooth_q=False))
    want, _ = exact(loud, torch.float64)
    cosines = F.cosine_similarity(out.double(), want, dim=3)
    assert (cosines > 0.99).double().mean() > 0.6


# case 26
@every_recipe
@pytest.mark.parametrize("kind", ["huge", "constant", "near the limit", "bf16 limit"])
def test_v_beyond_fp16(kind: str, recipe: Recipe) -> None:
    call = normal(B=1, Sq=40, Skv=640)
    flat = torch.zeros_like(call.k)
    calls = {
        "huge": replace(call, v=(call.v * 1e5).bfloat16()),
        "constant": replace(call, v=torch.full_like(call.v, 300.0), k=flat),
        "near the limit": replace(call, v=torch.full_like(call.v, 6e4).half(), k=flat),
        "bf16 limit": replace(call, v=torch.full_like(call.v, 3e38).bfloat16(), k=flat),
    }
    call = calls[kind]
    out, _ = emulate(call, recipe)
    want, _ = exact(call, torch.float64)
    assert compare(out, want).worst.rel_l1 < bound(recipe)


# case 25
@every_recipe
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-37, 1e-44])
def test_a_silent_channel_of_v_leaves_the_rest_untouched(recipe: Recipe, value: float) -> None:
    call = normal(Sq=40, Skv=100)
    full, _ = emulate(call, recipe)
    v = call.v.clone()
    v[..., 3] = value
    out, _ = emulate(replace(call, v=v), recipe)
    assert torch.equal(out[..., :3], full[..., :3])
    assert torch.equal(out[..., 4:], full[..., 4:])
    want = torch.full_like(out[..., 3], value)
    torch.testing.assert_close(
        out[..., 3], want, rtol=0.05, atol=6e-8 if recipe.pv == "fp16" else 1e-35
    )
    if value == 0:
        assert not out[..., 3].any()
        assert not emulate(replace(call, v=torch.zeros_like(v)), recipe)[0].any()


# case 25
@sample_recipes
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("value", [0.0, 1e-37])
def test_silent_queries_or_keys_give_the_mean(recipe: Recipe, where: str, value: float) -> None:
    call = normal(Sq=40, Skv=100)
    getattr(call, where)[:] = value
    out, lse = emulate(call, recipe)
    want = call.v.mean(2, keepdim=True).expand_as(out)
    assert compare(out, want).worst.rel_l1 < bound(recipe)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(100)), rtol=1e-5, atol=0)


# case 1
@sample_recipes
def test_keys_hidden_by_position_cost_no_more_than_a_shorter_call(recipe: Recipe) -> None:
    """Tiles that nobody sees by position are skipped, the others do not change."""
    call = normal(B=1, Sq=100, Skv=100)
    plain = replace(recipe, name="x", smooth_k=False, k_granularity="token")
    longer = normal(B=1, Sq=100, Skv=400, seed=1)
    k, v = longer.k.clone(), longer.v.clone()
    k[:, :, :100], v[:, :, :100] = call.k, call.v
    # Scales of V are per channel: keep them those of the first 100 keys.
    v[:, :, 100:] = v[:, :, 100:].sign() * call.v.abs().amax(2, keepdim=True).clamp(min=0)
    short = emulate(replace(call, causal_offset=0), plain)
    long = emulate(replace(call, k=k, v=v, causal_offset=0), plain)
    torch.testing.assert_close(long[0], short[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(long[1], short[1], atol=1e-6, rtol=1e-5)


@sample_recipes
@pytest.mark.parametrize("window", [1, 2, 64, 65, 1000])
@pytest.mark.parametrize("offset", [-30, 0, 45])
def test_windows(recipe: Recipe, window: int, offset: int) -> None:
    call = normal(B=1, Sq=110, Skv=140, causal_offset=offset, window=window)
    out, lse = emulate(call, recipe)
    i, j = torch.arange(110)[:, None] + offset, torch.arange(140)[None, :]
    keep = (j <= i) & (j > i - window)
    by_mask = replace(call, causal_offset=None, window=None, attn_mask=keep)
    want, want_lse = exact(by_mask, torch.float64)
    assert compare(out, want).worst.rel_l1 <= 1.9 * bound(recipe)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    assert torch.equal(exact(call)[1] == -math.inf, want_lse == -math.inf)


# algorithms: neither a soft cap nor a sink is shift-invariant
@every_recipe
@pytest.mark.parametrize("option", ["softcap", "sinks", "both"])
def test_an_offset_of_keys_survives_softcap_and_sinks(recipe: Recipe, option: str) -> None:
    call = normal(Sq=60, Skv=200)
    shift = 2 * torch.randn(64, generator=torch.Generator().manual_seed(5))
    softcap = None if option == "sinks" else 5.0
    sinks = None if option == "softcap" else torch.tensor([4.0, -1.0, 7.0])
    call = replace(call, k=call.k + shift, softcap=softcap, sinks=sinks)
    check(call, recipe, 2.0 * bound(recipe))


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    call = normal(Sq=10, Skv=40, causal_offset=-3)
    none = torch.full((3,), -math.inf)
    for recipe in (SAGE2_8, SAGE2PP_8, SAGE1_B, EXACT):
        out, lse = emulate(replace(call, sinks=none), recipe)
        want, want_lse = emulate(call, recipe)
        torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)
