"""Calls of random data, what each recipe was measured to cost on them, and the check against FP64
that tests of the numerics share.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

QUANTISED = tuple(recipe for recipe in RECIPES.values() if not recipe.exact)
EIGHT_BIT = tuple(recipe for recipe in QUANTISED if recipe.qk_bits == 8)
# One of each arithmetic: P and V in E4M3 with FP16 and FP32 sums, INT8, FP16; Q and K in INT4.
SAMPLE = tuple(RECIPES[n] for n in ("sage2pp_8", "sage2_8", "sage1_vt", "sage1_b", "sage2_4"))

every_recipe = pytest.mark.parametrize("recipe", QUANTISED, ids=lambda recipe: recipe.name)
eight_bit_recipes = pytest.mark.parametrize("recipe", EIGHT_BIT, ids=lambda recipe: recipe.name)
sample_recipes = pytest.mark.parametrize("recipe", SAMPLE, ids=lambda recipe: recipe.name)

# Relative L1 of the worst head and cosine of the worst head on `normal()`, as this emulator gave
# them; the same numbers on larger data are in benchmarks/numerics_table.csv.
MEASURED: dict[str, tuple[float, float]] = {
    "sage2pp_8": (0.0361, 0.99935),
    "sage2_8": (0.0360, 0.99935),
    "sage2_8b": (0.0367, 0.99933),
    "sage2_8b_k128": (0.0369, 0.99932),
    "sage2pp_8_d1": (0.0361, 0.99935),
    "sage2pp_8_d4": (0.0363, 0.99934),
    "sage2pp_8_d6": (0.0368, 0.99932),
    "sage2pp_4": (0.1814, 0.98367),
    "sage2_4": (0.1812, 0.98374),
    "sage2pp_4_d1": (0.1814, 0.98367),
    "sage2pp_4_d4": (0.1813, 0.98367),
    "sage2pp_4_d6": (0.1820, 0.98362),
    "sage1_vt": (0.0184, 0.99981),
    "sage1_vb": (0.0213, 0.99976),
    "sage1_b": (0.0132, 0.99991),
    "sage1_t": (0.0085, 0.99996),
    "sage1_b_f32": (0.0132, 0.99991),
    "sage1_t_f32": (0.0085, 0.99996),
    "sage2_8_bf16": (0.0102, 0.99995),
    "sage2_4_f16": (0.1780, 0.98428),
}
MARGIN = 4 / 3


def bound(recipe: Recipe) -> float:
    """The relative L1 that a head of normal data may have."""
    return MARGIN * MEASURED[recipe.name][0]


def normal(
    B: int = 2,
    Hq: int = 3,
    Hkv: int | None = None,
    Sq: int = 130,
    Skv: int = 300,
    D: int = 64,
    Dv: int | None = None,
    seed: int = 0,
    scale: float | None = None,
    **options: Any,
) -> Call:
    """A call of normal data; odd sizes, several heads and batches."""
    g = torch.Generator().manual_seed(seed)
    Hkv = Hq if Hkv is None else Hkv
    q = torch.randn(B, Hq, Sq, D, generator=g)
    k = torch.randn(B, Hkv, Skv, D, generator=g)
    v = torch.randn(B, Hkv, Skv, D if Dv is None else Dv, generator=g)
    return Call(q, k, v, D**-0.5 if scale is None else scale, **options)


def check(call: Call, recipe: Recipe, limit: float | None = None) -> None:
    """The emulator against FP64: output of every head, and the log-sum-exp."""
    out, lse = emulate(call, recipe)
    want, want_lse = exact(call, torch.float64)
    worst = compare(out, want).worst
    assert worst.finite
    # Errors of scores grow with the scores.
    loud = max(1.0, abs(call.scale) * call.q.shape[3] ** 0.5)
    assert worst.rel_l1 <= (bound(recipe) if limit is None else limit) * loud, worst
    assert abs(worst.norm_ratio - 1) <= 0.06, worst
    sees = want_lse != -math.inf
    assert torch.equal(lse == -math.inf, ~sees)
    worst_lse = (lse[sees].double() - want_lse[sees]).abs() / (1 + 0.05 * want_lse[sees].abs())
    assert (worst_lse <= loud * (0.6 if recipe.qk_bits == 4 else 0.06)).all()
