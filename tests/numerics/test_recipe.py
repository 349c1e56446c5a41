"""Recipes: the accumulator bound, the table, names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import (
    FP16_MAX,
    MMA_K,
    RECIPES,
    SAGE1_B,
    SAGE2_8,
    SAGE2PP_8,
    largest_fp16_v_range,
)

# Products P_r * V_r that two papers and our own arithmetic allow for 1, 2, 4 and 6 MMAs of 32 keys.
LARGEST_PRODUCT = {1: 2047.0, 2: 1023.5, 4: 511.75, 6: 341.1666}


@pytest.mark.parametrize("depth", LARGEST_PRODUCT)
def test_the_bound_of_an_fp16_accumulator_is_exact(depth: int) -> None:
    v_range = largest_fp16_v_range(depth, 224.0, 32)
    assert v_range * 224 == pytest.approx(LARGEST_PRODUCT[depth], rel=1e-5)
    fits = replace(SAGE2PP_8, depth=depth, v_range=v_range, k_block=32 * depth)
    with pytest.raises(InvalidArgument, match="can overflow"):
        replace(fits, v_range=v_range * 1.001)


def test_a_range_that_rounds_up_counts_rounded() -> None:
    """4.8 becomes the E4M3 code 5: 64 x 213 x 5 overflows though 64 x 213 x 4.8 does not."""
    assert 64 * 213 * 4.8 < FP16_MAX < 64 * 213 * 5
    with pytest.raises(InvalidArgument, match="V_r 5 "):
        replace(SAGE2PP_8, p_range=213.0, v_range=4.8)


def test_what_no_kernel_could_do_does_not_construct() -> None:
    with pytest.raises(InvalidArgument, match="limited to 448"):
        replace(SAGE2_8, p_range=449.0)
    with pytest.raises(InvalidArgument, match="limited to 127"):
        replace(RECIPES["sage1_vt"], v_range=128.0)
    with pytest.raises(InvalidArgument, match="INT32"):
        replace(RECIPES["sage1_vt"], accumulate="fp32")
    with pytest.raises(InvalidArgument, match="no multiple of the 64 keys"):
        replace(SAGE2PP_8, k_block=96)


def test_no_recipe_can_overflow() -> None:
    for recipe in RECIPES.values():
        if recipe.depth is not None:
            most = recipe.depth * MMA_K[recipe.pv] * recipe.p_range * recipe.v_range
            assert most <= FP16_MAX
            assert recipe.k_block % (recipe.depth * MMA_K[recipe.pv]) == 0


def test_depth_belongs_to_fp16_accumulators_alone() -> None:
    with pytest.raises(InvalidArgument, match="depth"):
        replace(SAGE2_8, depth=2)
    with pytest.raises(InvalidArgument, match="depth"):
        replace(SAGE2PP_8, depth=None)


def test_names_and_tiers() -> None:
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    for name, recipe in RECIPES.items():
        eight_bit_pv = name.startswith(("sage1_v", "sage2_8", "sage2pp")) or name == "sage2_4"
        eight_bit_pv = eight_bit_pv and not name.endswith("_bf16")
        want = "exact" if name == "exact" else ("fast" if eight_bit_pv else "safe")
        assert recipe.tier == want
    assert (SAGE1_B.qk_max, RECIPES["sage2_4"].qk_max) == (127, 7)
