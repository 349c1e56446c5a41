"""The emulator against FP64 within what each recipe was measured to cost, and against a second
implementation that shares no code with it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from loop_reference import attention_by_the_book
from numerics_support import (
    MEASURED,
    SAMPLE,
    bound,
    check,
    eight_bit_recipes,
    every_recipe,
    normal,
    sample_recipes,
)

from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.exact import members
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, SAGE2_8, Recipe
from sagepatch.spec import Call


@every_recipe
def test_normal_data_costs_what_was_measured(recipe: Recipe) -> None:
    call = normal()
    check(call, recipe)
    worst = compare(emulate(call, recipe)[0], exact(call, torch.float64)[0]).worst
    rel_l1, cosine = MEASURED[recipe.name]
    # Neither worse nor suspiciously better.
    assert worst.rel_l1 == pytest.approx(rel_l1, rel=0.1)
    assert 1 - worst.cosine == pytest.approx(1 - cosine, rel=0.2)


def test_the_order_of_the_recipes_is_that_of_their_formats() -> None:
    call = normal(B=1, Sq=256, Skv=1024)
    want = exact(call, torch.float64)[0]

    def error(name: str) -> float:
        return compare(emulate(call, RECIPES[name])[0], want).whole.rmse

    assert error("sage1_t_f32") < error("sage1_b_f32") < error("sage1_vb") < error("sage2_8")
    assert error("sage1_vt") < error("sage1_vb")
    assert error("sage2_8") < 0.3 * error("sage2_4_f16")


MASK = torch.rand(1, 2, 11, 150, generator=torch.Generator().manual_seed(8)) > 0.4
MASK[..., :21], MASK[:, 1, 3], MASK[..., 128:] = False, False, False
BIAS = torch.randn(11, 150, generator=torch.Generator().manual_seed(9))
BIAS[4, 7:90], BIAS[5] = -math.inf, torch.finfo(torch.float32).min
BOOK: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal window": {"causal_offset": 100, "window": 70},
    "causal from the top": {"causal_offset": -3},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([1.0, -1.0])},
    "sinks softcap mask": {"sinks": torch.tensor([2.0, 0.0]), "softcap": 9.0, "attn_mask": MASK},
    "bool mask": {"attn_mask": MASK},
    "additive mask causal": {"attn_mask": BIAS, "causal_offset": 120},
    "negative scale": {"scale": -0.3},
}


@every_recipe
@pytest.mark.parametrize("options", BOOK)
def test_equals_the_loop_of_the_documents(recipe: Recipe, options: str) -> None:
    call = normal(1, 2, 1, 11, 150, 16, 8, **{"scale": 0.4, **BOOK[options]})
    call = replace(call, k=call.k + 1)
    assert_by_the_book(call, recipe)


@pytest.mark.parametrize("field", ["q_granularity", "k_granularity"])
@pytest.mark.parametrize("granularity", ["token", "thread", "block", "tensor"])
def test_every_granularity_equals_the_loop(field: str, granularity: str) -> None:
    recipe = replace(SAGE2_8, name="x", q_block=32, **{field: granularity})
    assert_by_the_book(normal(1, 2, 1, 75, 150, 16, 8), recipe)


@pytest.mark.parametrize("fields", [{"smooth_v": True}, {"smooth_k": False}, {"pv": "e5m2"}])
@pytest.mark.parametrize("sums", [True, False], ids=["quantised sum", "plain sum"])
@pytest.mark.parametrize("name", ["sage2pp_4", "sage1_vb", "sage1_t"])
def test_optional_fields_equal_the_loop(name: str, sums: bool, fields: dict[str, Any]) -> None:
    if "pv" in fields and RECIPES[name].pv != "e4m3":
        fields = {"smooth_v": True, "smooth_q": True}
    recipe = replace(RECIPES[name], name="x", sum_quantised_p=sums, q_block=32, **fields)
    call = normal(1, 2, 2, 37, 150, 16, 8, sinks=torch.tensor([0.5, -1.0]))
    assert_by_the_book(replace(call, v=call.v + 2), recipe)


def assert_by_the_book(call: Call, recipe: Recipe) -> None:
    """Equal but for fp32; a probability at the edge between two codes may take the other one."""
    out, lse = emulate(call, recipe)
    want, want_lse = attention_by_the_book(call, recipe)
    difference = (out - want).abs() / (1e-3 + want.abs().amax())
    assert difference.median() < 1e-6
    assert difference.max() < 2e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal_offset": 0, "Sq": 200, "Skv": 200},
    "causal bottom right": {"causal_offset": 170},
    "causal rows without keys": {"causal_offset": -20, "Sq": 90, "Skv": 70},
    "window": {"causal_offset": 0, "window": 17, "Sq": 150, "Skv": 150},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0])},
    "grouped queries": {"Hq": 6, "Hkv": 2},  # case 11
    "wide values": {"Dv": 96, "D": 40},  # cases 5, 12
    "narrow values": {"Dv": 40, "D": 72},
    "scale 1": {"scale": 1.0, "D": 16},  # case 6
    "short": {"Sq": 1, "Skv": 17},  # case 14
}


@every_recipe
@pytest.mark.parametrize("options", OPTIONS)
def test_options(recipe: Recipe, options: str) -> None:
    # Few keys are left to average over, or scores are larger than normal.
    check(normal(**OPTIONS[options]), recipe, 1.9 * bound(recipe))


# cases 1, 2, 14, 15
@pytest.mark.parametrize("Skv", [1, 2, 9, 63, 64, 65, 127, 128, 129, 191, 193, 503])
@pytest.mark.parametrize("Sq", [1, 9, 65])
def test_odd_lengths(Sq: int, Skv: int) -> None:
    for recipe in SAMPLE:
        check(normal(Sq=Sq, Skv=Skv), recipe, 2.0 * bound(recipe))


# case 15
@every_recipe
def test_one_key_gives_v_and_no_key_gives_zeros(recipe: Recipe) -> None:
    call = normal(Sq=5, Skv=1)
    out, _ = emulate(call, recipe)
    # Each channel of V is a group of its own, whose one value is its largest: a code, exactly.
    tolerance = {"fp16": 5e-4, "bf16": 4e-3}.get(recipe.pv, 1e-6)
    torch.testing.assert_close(out, call.v.expand_as(out), rtol=tolerance, atol=1e-6)
    out, lse = emulate(normal(Sq=5, Skv=0), recipe)
    assert torch.equal(out, torch.zeros(2, 3, 5, 64))
    assert (lse == -math.inf).all()
    assert lse.shape == (2, 3, 5)


@pytest.mark.parametrize("shape", [(0, 2, 2, 4, 4), (2, 2, 2, 0, 4), (0, 4, 2, 0, 0)], ids=str)
def test_calls_of_nothing_give_nothing(shape: tuple[int, int, int, int, int]) -> None:
    call = normal(*shape, D=8, Dv=6)
    for recipe in (*SAMPLE, RECIPES["exact"]):
        out, lse = emulate(call, recipe)
        assert out.shape == (*shape[:2], shape[3], 6)
        assert lse.shape == (*shape[:2], shape[3])


# case 11
@sample_recipes
@pytest.mark.parametrize("Hkv", [1, 2, 4, 8])
def test_query_heads_find_their_key_head(recipe: Recipe, Hkv: int) -> None:
    call = normal(1, 8, Hkv, 33, 70, 16)
    v = torch.arange(1.0, Hkv + 1).view(1, Hkv, 1, 1).expand(1, Hkv, 70, 16)
    out, _ = emulate(replace(call, v=v), recipe)
    want = (torch.arange(8) // (8 // Hkv) + 1.0).view(1, 8, 1, 1).expand_as(out)
    torch.testing.assert_close(out, want, rtol=0.02, atol=0)


# case 7
@sample_recipes
def test_strides_change_no_bit(recipe: Recipe) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 50, 4, 32, generator=g)
    q, k = x.transpose(1, 2), torch.randn(2, 4, 32, 80, generator=g).transpose(2, 3)
    v = torch.randn(1, 4, 160, 32, generator=g)[:, :, ::2].expand(2, -1, -1, -1)
    before = [t.clone() for t in (q, k, v)]
    got = emulate(Call(q, k, v, 0.2), recipe)
    want = emulate(Call(q.contiguous(), k.contiguous(), v.contiguous(), 0.2), recipe)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


# case 23
@sample_recipes
@pytest.mark.parametrize(
    "dtypes",
    list(itertools.product([torch.bfloat16, torch.float16, torch.float64], repeat=2)),
    ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""),
)
def test_dtypes_may_be_mixed(recipe: Recipe, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    call = normal(Sq=40, Skv=90)
    call = replace(call, q=call.q.to(dtypes[0]), k=call.k.to(dtypes[0]), v=call.v.to(dtypes[1]))
    check(call, recipe, 1.3 * bound(recipe))
    out, lse = emulate(call, recipe)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


@sample_recipes
def test_autocast_does_not_reach_the_arithmetic(recipe: Recipe) -> None:
    call = normal(Sq=40, Skv=90)
    want = emulate(call, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        got = emulate(call, recipe)
        assert torch.equal(exact(call)[0], exact(call)[0].float())
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# cases 16, 17
def test_packed_members_are_calls_of_their_own() -> None:
    g = torch.Generator().manual_seed(3)
    ends_q, ends_kv = [0, 0, 1, 1, 131, 140], [0, 0, 3, 3, 80, 80]
    q = torch.randn(1, 2, 140, 32, generator=g)
    k, v = torch.randn(2, 1, 2, 80, 32, generator=g).unbind(0)
    for dtype in (torch.int32, torch.int64):
        packed = Call(
            q,
            k,
            v,
            0.2,
            causal_offset=1,
            cu_seqlens_q=torch.tensor(ends_q, dtype=dtype),
            cu_seqlens_kv=torch.tensor(ends_kv, dtype=dtype),
        )
        for recipe in (*SAMPLE, RECIPES["exact"]):
            out, lse = emulate(packed, recipe)
            parts = [emulate(member, recipe) for member in members(packed)]
            assert torch.equal(out, torch.cat([part[0] for part in parts], 2))
            assert torch.equal(lse, torch.cat([part[1] for part in parts], 2))
            assert torch.equal(out[:, :, 131:], torch.zeros(1, 2, 9, 32))  # nobody's keys


# case 17
def test_each_member_has_a_mean_of_its_own() -> None:
    g = torch.Generator().manual_seed(4)
    offset = 40 * torch.randn(64, generator=g)
    q = torch.randn(1, 1, 512, 64, generator=g)
    k, v = torch.randn(2, 1, 1, 512, 64, generator=g).unbind(0)
    k = torch.cat([k[:, :, :256] + offset, k[:, :, 256:] - offset], 2)
    ends = torch.tensor([0, 256, 512])
    call = Call(q, k, v, 0.125, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    want = exact(call, torch.float64)[0]
    recipe = RECIPES["sage1_t_f32"]
    assert compare(emulate(call, recipe)[0], want).worst.cosine > 0.999
    # The same keys under one mean are what this guards against.
    halves = torch.arange(512) < 256
    one_mean = Call(q, k, v, 0.125, attn_mask=halves[:, None] == halves[None, :])
    assert compare(emulate(one_mean, recipe)[0], want).worst.cosine < 0.99


# case 29
@eight_bit_recipes
@pytest.mark.parametrize("offset", [4.0, 16.0, 64.0])
def test_keys_with_a_common_offset(recipe: Recipe, offset: float) -> None:
    call = normal(Sq=200, Skv=400)
    shift = offset * torch.randn(64, generator=torch.Generator().manual_seed(5))
    call = replace(call, k=call.k + shift)
    want, want_lse = exact(call, torch.float64)
    out, lse = emulate(call, recipe)
    assert compare(out, want).worst.cosine >= 0.999
    # The log-sum-exp is that of the scores before smoothing.
    torch.testing.assert_close(lse.double(), want_lse, atol=0.02, rtol=1e-4)
    rough = compare(emulate(call, replace(recipe, smooth_k=False))[0], want).worst.cosine
    smooth = compare(out, want).worst.cosine
    assert 1 - rough > 1.5 * (1 - smooth)


# case 29
def test_four_bits_need_both_smoothings() -> None:
    call = normal(Sq=256, Skv=512)
    q_offset = 3 * torch.randn(64, generator=torch.Generator().manual_seed(6))
    for shifted, least in ((call, 0.98), (replace(call, q=call.q + q_offset), 0.9)):
        want = exact(shifted, torch.float64)[0]
        both = compare(emulate(shifted, RECIPES["sage2_4"])[0], want).worst
        alone = replace(RECIPES["sage2_4"], smooth_q=False)
        one = compare(emulate(shifted, alone)[0], want).worst
        assert both.cosine >= least
        assert both.rel_l1 < one.rel_l1
    assert both.rel_l1 < 0.75 * one.rel_l1


def test_smoothing_and_rotation_help_where_they_should() -> None:
    call = normal(Skv=400)
    call = replace(call, v=call.v + 5.0)
    call.q[..., 7] *= 12
    call.k[..., 7] *= 12
    want = exact(call, torch.float64)[0]

    def error(**fields: Any) -> float:
        return compare(emulate(call, replace(SAGE2_8, name="x", **fields))[0], want).whole.rmse

    plain = error()
    assert error(smooth_v=True) < 0.8 * plain
    assert error(rotate=True, smooth_v=True) < 0.9 * error(smooth_v=True)
    assert error(sum_quantised_p=True) < 1.1 * plain
    assert error(k_granularity="tensor") > error(k_granularity="token")


@sample_recipes
def test_rotation_keeps_scores_of_any_head_size(recipe: Recipe) -> None:
    for D in (1, 40, 72, 128):
        check(normal(D=D, Sq=30, Skv=90), replace(recipe, rotate=True), 2.0 * bound(recipe))


def test_two_runs_agree_to_the_bit_and_no_gradient_flows() -> None:
    call = normal(Sq=70, Skv=130)
    call = replace(call, q=call.q.requires_grad_())
    for recipe in SAMPLE:
        first, second = emulate(call, recipe), emulate(call, recipe)
        assert torch.equal(first[0], second[0])
        assert not first[0].requires_grad
