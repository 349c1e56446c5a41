"""Changes of a recipe that make it more accurate, in the order of their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sagepatch.numerics.recipe import E4M3_MAX, RECIPES, Recipe

Change = Callable[[Recipe], Recipe]


def _without_fp16_sums(recipe: Recipe) -> Recipe:
    """The same recipe summing in FP32, with the ranges that this allows."""
    if recipe.pv == "e4m3":
        return replace(recipe, accumulate="fp32", depth=None, p_range=E4M3_MAX, v_range=E4M3_MAX)
    v_range = RECIPES["sage1_b_f32"].v_range
    return replace(recipe, accumulate="fp32", depth=None, v_range=v_range)


def _fp16_values(recipe: Recipe) -> Recipe:
    """The same recipe with P and V in FP16, summed in FP32."""
    model = RECIPES["sage1_b_f32"]
    return replace(
        recipe,
        pv=model.pv,
        accumulate=model.accumulate,
        depth=model.depth,
        p_range=model.p_range,
        v_range=model.v_range,
    )


# In the order of cost: scales cost nothing, smoothing Q a product of vectors, a rotation two
# products of matrices as small as a head, smoothing V a pass over the output, sums in FP32 the rate
# of the matrix units, P and V in FP16 half of it. Each with whether a recipe has it already.
REMEDIES: dict[str, tuple[Callable[[Recipe], bool], Change]] = {
    "per-token scales": (
        lambda r: r.q_granularity == "token" and r.k_granularity in ("token", "thread"),
        lambda r: replace(r, q_granularity="token", k_granularity="token"),
    ),
    "Q smoothing": (lambda r: r.smooth_q, lambda r: replace(r, smooth_q=True)),
    "rotation": (lambda r: r.rotate, lambda r: replace(r, rotate=True)),
    "V smoothing": (lambda r: r.smooth_v, lambda r: replace(r, smooth_v=True)),
    "FP16 accumulation off": (lambda r: r.accumulate != "fp16", _without_fp16_sums),
    "P and V in FP16": (lambda r: r.pv == "fp16", _fp16_values),
}


def gained(base: Recipe, other: Recipe) -> tuple[str, ...]:
    """The remedies that one recipe has and another has not, in the order of cost.

    >>> gained(RECIPES["sage2pp_8"], RECIPES["sage2_8"])
    ('FP16 accumulation off',)
    """
    return tuple(name for name, (has, _) in REMEDIES.items() if has(other) and not has(base))
