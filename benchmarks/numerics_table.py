"""The papers' accuracy experiments repeated with our emulator, on data that anyone can make.

    python benchmarks/numerics_table.py

Writes benchmarks/numerics_table.csv: experiment, setting, cosine, relative L1, RMSE. Runs on a CPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sagepatch.env import Machine
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

COMMAND = "python benchmarks/numerics_table.py"
HEADS, LENGTH, DIM = 4, 1024, 128


def normal(offset: float = 0.0) -> Call:
    """Standard normal q, k, v; one key channel shifted by `offset`. Seed 0."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM, generator=g).unbind(0)
    k = k.clone()
    k[..., 5] += offset
    return Call(q, k, v, DIM**-0.5)


def experiments() -> Iterator[tuple[str, str, Call, Recipe]]:
    """(experiment, setting, call, recipe) of every row."""
    plain, shifted = normal(), normal(8.0)
    for name in ("sage1_t", "sage1_b", "sage1_vt", "sage1_vb", "sage2_8", "sage2pp_8", "sage2_4"):
        yield "normal data", name, plain, RECIPES[name]
    for name in ("sage1_b", "sage1_b_f32"):
        yield "FP16 against FP32 accumulation", name, plain, RECIPES[name]
    base, plus = RECIPES["sage2_8"], RECIPES["sage2pp_8"]
    yield "ranges of P and V", "448, 448, FP32", plain, base
    for p, v in ((448.0, 2.25), (224.0, 4.5), (112.0, 9.0)):
        yield "ranges of P and V", f"{p:g}, {v:g}", plain, replace(plus, p_range=p, v_range=v)
    for granularity in ("token", "block"):
        for smooth in (True, False):
            recipe = replace(
                RECIPES["sage1_t_f32"],
                k_granularity=granularity,
                q_granularity=granularity,
                smooth_k=smooth,
            )
            setting = f"per {granularity}, {'smoothed' if smooth else 'not smoothed'}"
            yield "one K channel with offset 8", setting, shifted, recipe
    for smooth in (True, False):
        recipe = replace(RECIPES["sage2_4"], smooth_q=smooth)
        setting = "Q and K smoothed" if smooth else "K smoothed"
        yield "INT4 Q and K", setting, plain, recipe


def main() -> None:
    """Measure every row against FP64."""
    versions = f"torch {Machine.here().versions['torch']}"
    rows = []
    for experiment, setting, call, recipe in experiments():
        whole = compare(emulate(call, recipe)[0], exact(call, torch.float64)[0]).whole
        rows.append(
            {
                "experiment": experiment,
                "setting": setting,
                "cosine": f"{whole.cosine:.5f}",
                "rel_l1": f"{whole.rel_l1:.4f}",
                "rmse": f"{whole.rmse:.2e}",
                "data": f"1x{HEADS}x{LENGTH}x{DIM}, seed 0",
                "device": "CPU",
                "versions": versions,
                "command": COMMAND,
            }
        )
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
