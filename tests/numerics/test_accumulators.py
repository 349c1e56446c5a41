"""FP16 accumulators that round after every MMA, flush when they should and never overflow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from numerics_support import normal

from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import (
    RECIPES,
    SAGE1_B,
    SAGE2_8,
    SAGE2PP_8,
    Recipe,
)
from sagepatch.spec import Call

FP16_SUMS = [recipe for recipe in RECIPES.values() if recipe.depth is not None]


def equal_keys(v: torch.Tensor) -> Call:
    """One query that sees every key with the same weight; v holds one channel."""
    keys = len(v)
    return Call(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, keys, 16), v.view(1, 1, keys, 1), 1.0)


def sums(call: Call, recipe: Recipe) -> float:
    """The sum of codes of P times codes of V that a recipe arrives at; 16-bit values are their own
    codes, other formats map the largest value, here 1, to V_r.
    """
    out, _ = emulate(call, recipe)
    v_range = 1.0 if recipe.pv in ("fp16", "bf16") else recipe.v_range
    return out.item() * call.k.shape[2] * recipe.p_range * v_range


def test_the_second_mma_meets_an_accumulator_of_eleven_bits() -> None:
    """896 plus a piece of 0.4375: FP32 keeps it, FP16 rounds it to its last bit there, 0.5."""
    v = torch.zeros(64)
    v[0] = 1.0  # fills the range: code 4, times the code 224 of a probability of 1
    v[32] = 2.0**-11  # code 2^-9, the least that E4M3 has; summed by the second MMA
    ranges = {"name": "x", "v_range": 4.0, "p_range": 224.0}
    assert sums(equal_keys(v), replace(SAGE2_8, **ranges)) == pytest.approx(896.4375, rel=1e-6)
    assert sums(equal_keys(v), replace(SAGE2PP_8, **ranges)) == pytest.approx(896.5, rel=1e-6)
    # One MMA a flush: the piece reaches FP32 whole.
    alone = replace(SAGE2PP_8, depth=1, **ranges)
    assert sums(equal_keys(v), alone) == pytest.approx(896.4375, rel=1e-6)


def test_one_mma_rounds_once_and_not_per_key() -> None:
    """31 pieces of 0.4375 in the same MMA as 896: rounded together, not lost one by one."""
    v = torch.full((64,), 2.0**-11)
    v[0], v[32:] = 1.0, 0.0
    recipe = replace(SAGE2PP_8, name="x", v_range=4.0, p_range=224.0)
    whole = 896 + 31 * 0.4375  # 909.5625; FP16 steps by 0.5 here
    assert sums(equal_keys(v), recipe) == pytest.approx(909.5, rel=1e-6)
    assert whole == 909.5625


def test_fp16_values_round_every_sixteen_keys() -> None:
    v = torch.zeros(64)
    v[0] = 1000.0  # FP16 steps by 0.5 here
    v[16:] = 0.125
    # 16 x 0.125 = 2 an MMA: nothing is lost, where an accumulator of one key at a time loses all.
    assert sums(equal_keys(v), SAGE1_B) == pytest.approx(1006.0, rel=1e-6)
    v[16:] = 0.0
    v[16], v[32], v[48] = 0.2, 0.2, 0.2  # each less than half a step: each MMA rounds it away
    assert sums(equal_keys(v), SAGE1_B) == pytest.approx(1000.0, rel=1e-6)
    assert sums(equal_keys(v), RECIPES["sage1_b_f32"]) == pytest.approx(1000.6, rel=1e-6)


@pytest.mark.parametrize("recipe", FP16_SUMS, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
def test_the_largest_sum_stays_inside(recipe: Recipe, sign: int) -> None:
    """Every probability 1 and every value at the top of its range: the sum is the bound itself."""
    out, _ = emulate(equal_keys(torch.full((2 * recipe.k_block,), sign * 3e4)), recipe)
    assert out.item() == pytest.approx(sign * 3e4, rel=2e-3)


@pytest.mark.parametrize("recipe", FP16_SUMS, ids=lambda recipe: recipe.name)
def test_past_the_bound_it_overflows(recipe: Recipe) -> None:
    """What the constructor refuses does overflow in the emulator: rounding is not all it does."""
    over = replace(recipe, name="x")
    object.__setattr__(over, "v_range", 1.2 * recipe.v_range)  # past the constructor
    values = torch.full((2 * recipe.k_block,), over.v_range)
    assert emulate(equal_keys(values), over)[0].isinf().all()


def test_depth_of_the_buffer_changes_rounding_only() -> None:
    call = normal(Skv=768)
    want = exact(call, torch.float64)[0]
    errors = [
        compare(emulate(call, RECIPES[name])[0], want).whole.rel_l1
        for name in ("sage2_8", "sage2pp_8_d1", "sage2pp_8", "sage2pp_8_d4", "sage2pp_8_d6")
    ]
    assert max(errors) < 1.05 * min(errors)


def test_integer_sums_are_exact() -> None:
    """INT8 values that cancel: an inexact accumulator would leave a remainder."""
    v = torch.ones(128)
    v[::2] = -1.0
    assert sums(equal_keys(v), RECIPES["sage1_vt"]) == 0.0
    v[0] = 1.0
    assert sums(equal_keys(v), RECIPES["sage1_vt"]) == pytest.approx(2 * 127 * 127, rel=1e-6)


def test_probabilities_are_relative_to_the_running_maximum() -> None:
    """A score 5 above all others in the second tile: tile one keeps codes of full size, decayed."""
    k = torch.zeros(1, 1, 128, 16)
    k[0, 0, 100, 0] = 5.0
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1.0
    v = torch.randn(1, 1, 128, 4, generator=torch.Generator().manual_seed(0))
    recipe = replace(RECIPES["sage1_vt"], name="x", smooth_k=False, k_granularity="token")
    out, lse = emulate(Call(q, k, v, 1.0), recipe)
    amax = v.abs().amax(2, keepdim=True)
    codes = torch.round(v * (127 / amax))
    total = 64 + 63 + math.exp(5)
    # Tile one: codes of 127. Tile two: the winner 127, the rest rint(127 exp(-5)) = 1.
    first = codes[:, :, :64].sum(2) * 127 * math.exp(-5)
    second = codes[:, :, 64:].sum(2) + 126 * codes[:, :, 100]
    want = (first + second) / 127 * amax[:, :, 0] / 127 / (total * math.exp(-5))
    torch.testing.assert_close(out[:, :, 0], want, rtol=1e-5, atol=1e-6)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-6)
