"""What each choice in the FP8 and INT4 recipes costs: depth of the FP16 buffer, ranges of P and V,
smoothing of Q, the row sum. Emulated, against FP64.

    python benchmarks/ablations.py

Writes benchmarks/ablations.csv. Runs on a CPU in about two minutes; it measures accuracy, not
speed. docs/ablations.md reads the table, benchmarks/ablation_page.py writes and draws it.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from numerics_table import Recorded, normal
from torch import Tensor

from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import Comparison, compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

COMMAND = "python benchmarks/ablations.py"
SEEDS = (0, 1, 2)
PROMPTS = ("a red apple", "a bullet train")
# The first, a middle and the last step of the demo's eight.
STEPS = (0, 3, 7)
PP = RECIPES["sage2pp_8"]
# 1.125 * 2^8 has the mantissa of 2.25, 4.5 and 9: with it FP32 sums meet the same codes of V.
SAME_MANTISSA = 288.0


@dataclass(frozen=True, slots=True)
class Data:
    """Calls under one name, and their attention in FP64."""

    name: str
    calls: tuple[Call, ...]
    references: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, calls: Iterator[Call]) -> Data:
        kept = tuple(calls)
        return cls(name, kept, tuple(exact(call, torch.float64)[0] for call in kept))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table for each data set in `data`; `twin` has FP32 sums of the same codes."""

    ablation: str
    name: str
    recipe: Recipe
    data: tuple[str, ...]
    twin: Recipe | None = None


def outliers(seed: int) -> Call:
    """One entry of Q, K and V in a thousand deviates ten times as much, and all keys of a head
    share 16 times a normal vector.
    """
    g = torch.Generator().manual_seed(100 + seed)
    call = normal(seed=seed)
    shape = call.q.shape

    def spiked(x: Tensor) -> Tensor:
        hit = torch.rand(shape, generator=g) < 1e-3
        return x + 10 * torch.randn(shape, generator=g) * hit

    q, k, v = map(spiked, (call.q, call.k, call.v))
    shared = torch.randn(1, shape[1], 1, shape[3], generator=g)
    return replace(call, q=q, k=k + 16 * shared, v=v)


def peaked(seed: int) -> Call:
    """64 queries of twice the size on 8,192 keys: rows with a high maximum and a long tail."""
    call = normal((1, 2, 8192, 128), seed)
    return replace(call, q=2 * call.q[:, :, :64])


def biased_q(seed: int) -> Call:
    """Normal data, all queries of a head plus 3 times a normal vector."""
    call = normal(seed=seed)
    g = torch.Generator().manual_seed(200 + seed)
    return replace(call, q=call.q + 3 * torch.randn(call.q.shape[3], generator=g))


def lifted(call: Call) -> Call:
    """V with a mean of 3: large sums, small noise."""
    return replace(call, v=call.v + 3)


def demo() -> Iterator[Call]:
    """What the denoiser of the bundled pipeline, a small trained Flux, really attends to: all
    layers at `STEPS` for `PROMPTS`.
    """
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    arguments = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__dataclass_fields__}
    for prompt in PROMPTS:
        with torch.no_grad(), Recorded() as recorded:
            pipe(prompt, generator=torch.Generator("cpu").manual_seed(0), **arguments)
        layers = len(recorded.calls) // DEFAULTS.num_inference_steps
        for step in STEPS:
            yield from recorded.calls[step * layers : (step + 1) * layers]


def data_sets() -> dict[str, Data]:
    """Every data set by name."""
    made = (
        Data.of("normal", (normal(seed=seed) for seed in SEEDS)),
        Data.of("outliers", map(outliers, SEEDS)),
        Data.of("demo", demo()),
        Data.of("peaked", map(peaked, SEEDS)),
        Data.of("V + 3", (lifted(normal(seed=seed)) for seed in SEEDS)),
        Data.of("peaked, V + 3", (lifted(peaked(seed)) for seed in SEEDS)),
        Data.of("Q + 3", map(biased_q, SEEDS)),
    )
    return {data.name: data for data in made}


MAIN = ("normal", "outliers", "demo")


def fp32(recipe: Recipe) -> Recipe:
    """The same codes summed in FP32 over a tile."""
    return replace(recipe, name=f"{recipe.name} fp32", accumulate="fp32", depth=None)


def depths() -> Iterator[Setting]:
    """Each depth at the ranges that its bound allows, and all depths at one range."""
    data = (*MAIN, "V + 3")
    make = partial(Setting, "depth", data=data)
    for name in ("sage2pp_8_d1", "sage2pp_8", "sage2pp_8_d4"):
        recipe = RECIPES[name]
        yield make(f"{name}: {_ranges(recipe)}", recipe, twin=fp32(recipe))
    for depth in (1, 2, 4):
        recipe = replace(PP, p_range=112.0, v_range=4.5, depth=depth, k_block=128)
        yield make(f"depth {depth}: {_ranges(recipe)}", recipe, twin=fp32(recipe))
    yield make("sage2_8: 448, 448, FP32 sums", RECIPES["sage2_8"])
    same = replace(RECIPES["sage2_8"], v_range=SAME_MANTISSA)
    yield make(f"FP32 sums: {_ranges(same)}", same)


def products() -> Iterator[Setting]:
    """P_r * V_r from the most that a depth of 1 allows down to 50, by either factor."""
    one = RECIPES["sage2pp_8_d1"]
    data = (*MAIN, "peaked")
    steps = (2046.9, 2016.0, 1008.0, 504.0, 252.0, 126.0, 63.0, 50.0)
    for product in steps:
        low_v = replace(one, v_range=product / 448.0)
        yield Setting("product, by V_r", f"{product:g}", low_v, data)
    for product in steps[1:]:
        low_p = replace(one, p_range=product / 4.5)
        yield Setting("product, by P_r", f"{product:g}", low_p, data)
    for v_range in (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5):
        recipe = replace(one, p_range=224.0, v_range=v_range)
        yield Setting("mantissa of V_r", f"{v_range:g}", recipe, MAIN)


def splits() -> Iterator[Setting]:
    """The same product of 1008, split otherwise; the first three are the paper's."""
    data = (*MAIN, "peaked")
    for p_range in (448.0, 224.0, 112.0, 56.0, 28.0, 14.0, 7.0, 3.5, 2.25):
        recipe = replace(PP, p_range=p_range, v_range=1008.0 / p_range)
        yield Setting("split", _ranges(recipe), recipe, data)
    for v_range in (448.0, SAME_MANTISSA):
        recipe = replace(RECIPES["sage2_8"], v_range=v_range)
        yield Setting("split", f"{_ranges(recipe)}, FP32 sums", recipe, data)


def four_bits() -> Iterator[Setting]:
    """INT4 Q and K: what is smoothed, and rotation."""
    data = (*MAIN, "Q + 3")
    base = RECIPES["sage2pp_4"]
    for name, q, k in (
        ("Q and K smoothed", True, True),
        ("K smoothed", False, True),
        ("Q smoothed", True, False),
        ("neither", False, False),
    ):
        recipe = replace(base, smooth_q=q, smooth_k=k)
        yield Setting("INT4", f"INT4, {name}", recipe, data)
        if q and k:
            rotated = replace(recipe, rotate=True)
            yield Setting("INT4", f"INT4, {name}, rotated", rotated, data)
    yield Setting("INT4", "INT4, Q and K smoothed, FP16 P and V", RECIPES["sage2_4_f16"], data)
    yield Setting("INT4", "INT8, K smoothed", PP, data)


def row_sums() -> Iterator[Setting]:
    """The divisor from the probabilities or from their codes."""
    data = (*MAIN, "V + 3", "peaked", "peaked, V + 3")
    for name in ("sage2pp_8", "sage2_8", "sage1_vb"):
        for quantised in (False, True):
            of = "codes" if quantised else "probabilities"
            recipe = replace(RECIPES[name], sum_quantised_p=quantised)
            yield Setting("row sum", f"{name}, sum of {of}", recipe, data)


def _ranges(recipe: Recipe) -> str:
    return f"{recipe.p_range:g}, {recipe.v_range:g}"


def measure(setting: Setting, data: Data) -> dict[str, str]:
    """One row: means over the calls of a data set, and the worst head of all of them."""
    recipe = setting.recipe
    found: list[Comparison] = []
    apart: list[float] = []
    for call, reference in zip(data.calls, data.references, strict=True):
        out = emulate(call, recipe)[0]
        found.append(compare(out, reference))
        if setting.twin is not None:
            apart.append(compare(out, emulate(call, setting.twin)[0]).whole.rel_l1)
    whole, worst = [c.whole for c in found], [c.worst for c in found]
    ratio = max((w.norm_ratio for w in worst), key=lambda r: abs(r - 1))
    return {
        "ablation": setting.ablation,
        "setting": setting.name,
        "p_range": f"{recipe.p_range:.6g}",
        "v_range": f"{recipe.v_range:.6g}",
        "product": f"{recipe.p_range * recipe.v_range:.5g}",
        "depth": "" if recipe.depth is None else str(recipe.depth),
        "data": data.name,
        "calls": str(len(data.calls)),
        "rel_l1": f"{statistics.mean(w.rel_l1 for w in whole):.5f}",
        "rel_l1_least": f"{min(w.rel_l1 for w in whole):.5f}",
        "rel_l1_most": f"{max(w.rel_l1 for w in whole):.5f}",
        "rel_l1_worst_head": f"{max(w.rel_l1 for w in worst):.5f}",
        "cosine": f"{statistics.mean(w.cosine for w in whole):.6f}",
        "cosine_worst_head": f"{min(w.cosine for w in worst):.6f}",
        "norm_ratio_worst_head": f"{ratio:.5f}",
        "rel_l1_to_fp32_sums": f"{statistics.mean(apart):.3e}" if apart else "",
        "device": "CPU",
        "versions": f"torch {Machine.here().versions['torch']}",
        "command": COMMAND,
    }


def main() -> None:
    """Measure every setting on its data."""
    sets = data_sets()
    rows = []
    for setting in (*depths(), *products(), *splits(), *four_bits(), *row_sums()):
        for name in setting.data:
            row = measure(setting, sets[name])
            rows.append(row)
            shown = (row["ablation"], row["setting"], name, row["rel_l1"], row["cosine_worst_head"])
            print("{:18s} {:38s} {:14s} {} {}".format(*shown), flush=True)
    path = Path(__file__).with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
