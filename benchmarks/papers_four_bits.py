"""The accuracy tables of SageAttention2 (arXiv 2411.10958): Q and K in four bits under each way to
smooth them, each granularity of their scales and each format of P and V. Lines for
benchmarks/papers_tables.py, which measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from numerics_table import normal
from papers_row import Printed, Row, by_recipe
from torch import Tensor

from sagepatch.numerics.attention import emulate
from sagepatch.numerics.recipe import LARGEST_CODE, RECIPES, Recipe
from sagepatch.spec import Call

SAGE2 = "2411.10958"
ON_BOTH = "Q + 3 n, K + 16 n"
FOUR = RECIPES["sage2_4"]
AS_IT_IS = replace(FOUR, smooth_q=False, smooth_k=False)
# Of layers, and of the worst layer.
Pair = tuple[Printed, Printed]


def biased_q_and_k() -> Call:
    """Normal data, all queries of a head plus 3 times a normal vector, all keys plus 16 times
    another.
    """
    call = normal(seed=0)
    g = torch.Generator().manual_seed(300)
    one, other = (torch.randn(call.q.shape[3], generator=g) for _ in range(2))
    return replace(call, q=call.q + 3 * one, k=call.k + 16 * other)


def balanced(call: Call, strength: float = 0.5) -> Tensor:
    """INT4 after SmoothQuant's exchange: each channel of Q over a factor that K is multiplied by,
    from their largest entries.
    """
    q, k = (x.abs().amax((0, 2), keepdim=True).clamp_min(1e-6) for x in (call.q, call.k))
    factor = q**strength / k ** (1 - strength)
    return emulate(replace(call, q=call.q / factor, k=call.k * factor), AS_IT_IS)[0]


def four_bits() -> list[Row]:
    """Tables 4 and 17, 6 and 15, 7 and 16: mean of layers and worst layer."""
    return [*smoothings(), *granularities(), *formats()]


def smoothings() -> list[Row]:
    """What is done to Q and K before they are rounded."""
    printed: dict[str, tuple[Callable[[Call], Tensor], Pair]] = {
        "as they are": (
            by_recipe(AS_IT_IS),
            (Printed(0.8004, 0.3906, 0.2223), Printed(0.0483, 0.9979, 0.7784)),
        ),
        "rotated": (
            by_recipe(replace(AS_IT_IS, rotate=True)),
            (Printed(0.7977, 0.3782, 0.2180), Printed(0.0485, 0.9978, 0.7785)),
        ),
        "as SmoothQuant": (
            balanced,
            (Printed(0.9021, 0.3383, 0.1952), Printed(0.6449, 0.9262, 0.7204)),
        ),
        "K smoothed": (
            by_recipe(replace(AS_IT_IS, smooth_k=True)),
            (Printed(0.9807, 0.1493, 0.0743), Printed(0.9086, 0.3565, 0.1464)),
        ),
        "Q smoothed": (
            by_recipe(replace(AS_IT_IS, smooth_q=True)),
            (Printed(0.9830, 0.1250, 0.0712), Printed(0.9310, 0.2989, 0.2195)),
        ),
        "Q and K smoothed": (
            by_recipe(FOUR),
            (Printed(0.9946, 0.0648, 0.0334), Printed(0.9671, 0.1956, 0.0779)),
        ),
    }
    mean, worst = ("Table 4, mean of layers", "Table 17, worst layer")
    return [
        *(Row(SAGE2, mean, name, one, run, "demo") for name, (run, (one, _)) in printed.items()),
        *(Row(SAGE2, worst, name, one, run, ON_BOTH) for name, (run, (_, one)) in printed.items()),
    ]


def granularities() -> list[Row]:
    """How many numbers share a scale, P and V in FP16: so are the printed ones, by Table 7."""
    printed: dict[str, Pair] = {
        "token": (Printed(0.9945, 0.0649, 0.0335), Printed(0.9676, 0.1916, 0.0775)),
        "thread": (Printed(0.9945, 0.0622, 0.0313), Printed(0.9672, 0.1932, 0.0776)),
        "block": (Printed(0.9803, 0.1492, 0.0744), Printed(0.9068, 0.3615, 0.1490)),
        "tensor": (Printed(0.9715, 0.1800, 0.0865), Printed(0.8585, 0.4687, 0.2261)),
    }
    rows = []
    for over, table in (("mean", "Table 6, mean of layers"), ("worst", "Table 15, worst layer")):
        for name, pair in printed.items():
            recipe = replace(in_format("fp16"), q_granularity=name, k_granularity=name)
            one = pair[over == "worst"]
            rows.append(Row(SAGE2, table, f"per {name}", one, by_recipe(recipe), "demo", over))
    return rows


def formats() -> list[Row]:
    """P and V under INT4 Q and K, both smoothed, per token."""
    printed: dict[str, Pair] = {
        "int8": (Printed(0.7705, 0.5618, 0.5044), Printed(0.1952, 0.9579, 1.4483)),
        "e5m2": (Printed(0.9920, 0.0905, 0.0903), Printed(0.9494, 0.2327, 0.2361)),
        "e4m3": (Printed(0.9944, 0.0683, 0.0347), Printed(0.9670, 0.1956, 0.0779)),
        "fp16": (Printed(0.9945, 0.0649, 0.0335), Printed(0.9676, 0.1916, 0.0775)),
    }
    rows = []
    for over, table in (("mean", "Table 7, mean of layers"), ("worst", "Table 16, worst layer")):
        for name, pair in printed.items():
            recipe = replace(in_format(name), q_granularity="token", k_granularity="token")
            setting, one = f"P, V {name.upper()}", pair[over == "worst"]
            rows.append(Row(SAGE2, table, setting, one, by_recipe(recipe), "demo", over))
    return rows


def in_format(name: str) -> Recipe:
    """INT4 Q and K, both smoothed, with P and V in `name` and sums of 32 bits."""
    if name == "fp16":
        base = RECIPES["sage2_4_f16"]
        return replace(base, accumulate="fp32", depth=None)
    if name == "int8":
        return replace(FOUR, pv="int8", accumulate="int32", p_range=127.0, v_range=127.0)
    largest = LARGEST_CODE[name]
    return replace(FOUR, pv=name, p_range=largest, v_range=largest)
