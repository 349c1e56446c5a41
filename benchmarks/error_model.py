"""How well errors of layers and steps predict the error of the picture: random plans on the demo
pipeline, emulated, predicted and measured.

    python benchmarks/error_model.py [--plans 25]

Writes benchmarks/error_model.csv: `--plans` plans that quantise layers throughout, as many that
quantise layers in some parts of the schedule, and plans that quantise every layer in one part only.
Its last rows hold the rank correlations. Runs on a CPU. The measured error is that of the final
latents, relative to those of exact attention, root mean square.
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import sagepatch
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import candidates, pace
from sagepatch.calibration.cells import Cell, cells
from sagepatch.calibration.choose import Choice
from sagepatch.calibration.entries import entry_of, ranged
from sagepatch.calibration.planning import costs, options
from sagepatch.calibration.sections import COUNT, bounds, sampled_steps
from sagepatch.calibration.solve import combined, relative_error
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine
from sagepatch.plan import Plan

RECIPES = ("sage2_8", "sage1_vb", "sage2_4", "sage1_b")
PROMPT = "a red apple"

# (layer, part of the schedule) -> kernel
Draw = Callable[[LayerTable, Cell], str]


def latents(pipe: Any) -> torch.Tensor:
    """The final latents of one run at the demo's defaults, seed 0."""
    arguments = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__dataclass_fields__}
    generator = torch.Generator("cpu").manual_seed(0)
    found: torch.Tensor = pipe(
        PROMPT, generator=generator, output_type="latent", **arguments
    ).images
    return found.double()


def by_worst_head(cell: Cell, name: str) -> float:
    """What the error model would take for a layer's error if its worst head stood for all."""
    cosines = [row.errors[name].worst.cosine for row in cell.own]
    return relative_error(math.fsum(cosines) / len(cosines)) * math.sqrt(cell.share)


def drawn_plan(calibration: Calibration, draw: Draw) -> tuple[Plan, float, float, int]:
    """The plan of what `draw` says, its predicted error, that by the worst heads, and how many
    layers it quantises.
    """
    entries, errors, worst, quantised = [], [], [], 0
    for layer in calibration.layers:
        parts = cells(layer.rows)
        names = []
        cost = costs(layer, layer.candidates)
        for cell in parts:
            # A part that no step of this run falls in runs what the part before it runs.
            names.append(draw(layer, cell) if cell.own else names[-1])
            if cell.own:
                offered = {option.variant: option.error for option in options(layer, cell, cost)}
                errors.append(offered[names[-1]])
                if names[-1] != SDPA.name:
                    worst.append(by_worst_head(cell, names[-1]))
        quantised += any(name != SDPA.name for name in names)
        choices = [Choice(name, "drawn at random") for name in names]
        entries.append(
            entry_of(layer, choices[0])
            if len(parts) == 1
            else ranged(layer, parts, choices, (), layer.candidates)
        )
    plan = replace(calibration.plan(threshold=0.0), entries=tuple(entries))
    return plan, combined(errors), combined(worst), quantised


def by_layer(chance: random.Random) -> Draw:
    """Some layers, each by any recipe throughout."""
    share, held = chance.random(), {}

    def draw(layer: LayerTable, cell: Cell) -> str:
        if layer.site not in held:
            names = list(layer.names)
            held[layer.site] = chance.choice(names) if chance.random() < share else SDPA.name
        return held[layer.site]

    return draw


def by_part(chance: random.Random) -> Draw:
    """Some layers in some parts of the schedule, each by any recipe."""
    shares = [chance.random() ** 2 for _ in range(COUNT)]

    def draw(layer: LayerTable, cell: Cell) -> str:
        share = shares[next(i for i in range(COUNT) if bounds(i)[1] > cell.start)]
        return chance.choice(list(layer.names)) if chance.random() < share else SDPA.name

    return draw


def one_part(start: float, name: str) -> Draw:
    """Every layer by one recipe in one part of the schedule."""
    return lambda layer, cell: name if cell.start == start else SDPA.name


def plans(calibration: Calibration, count: int) -> Iterator[tuple[str, str, Draw]]:
    """Every plan to measure: its kind, what it is, and how it is drawn."""
    chance = random.Random(0)
    for number in range(count):
        yield "by layer", str(number), by_layer(chance)
        yield "by layer and part", str(number), by_part(chance)
    for cell in cells(calibration.layers[0].rows):
        for name in ("emulated.sage2_8", "emulated.sage2_4"):
            if cell.own:
                yield "one part", f"{name} from {cell.start:.3g}", one_part(cell.start, name)


def main() -> None:
    """Measure, draw plans, run each, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=25)
    count = parser.parse_args().plans
    candidates.EMULATED_RECIPES = RECIPES
    candidates.MOST_OF_TIER = {"fast": 3, "safe": 1}
    assert all(f"emulated.{name}" in BY_NAME for name in RECIPES)
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    exact = latents(pipe)
    # Every part of the schedule, whatever measuring takes.
    pace._admits = lambda walk, place, held: place.step in sampled_steps(place.steps)
    calibration = sagepatch.calibrate(pipe, run=lambda: latents(pipe), emulate=True)
    rows = []
    for kind, what, draw in plans(calibration, count):
        plan, predicted, worst, quantised = drawn_plan(calibration, draw)
        with sagepatch.apply(pipe, plan=plan, emulate=True):
            off = latents(pipe) - exact
        measured = float(off.norm() / exact.norm())
        errors = (f"{one:.5f}" for one in (predicted, worst, measured))
        rows.append([kind, what, quantised, *errors])
        print(*rows[-1], flush=True)
    versions = ", ".join(f"{n} {v}" for n, v in Machine.here().versions.items() if v)
    about = (
        f"{platform.machine()}, {torch.get_num_threads()} threads; {versions}; "
        f"python {' '.join(sys.argv)}"
    )
    last = []
    for kind in (*dict.fromkeys(row[0] for row in rows), "all"):
        chosen = [row for row in rows if kind in (row[0], "all")]
        pairs = [tuple(map(float, row[3:])) for row in chosen if float(row[3]) > 0]
        ratios = [measured / predicted for predicted, _, measured in pairs]
        predicted, worst, measured = zip(*pairs, strict=True)
        ranks = spearmanr(predicted, measured).statistic
        others = spearmanr(worst, measured).statistic
        least, mean, most = min(ratios), math.fsum(ratios) / len(ratios), max(ratios)
        told = f"rank correlation {ranks:.3f} (by worst heads {others:.3f}), n {len(pairs)}"
        ratio = f"measured over predicted {least:.2f} to {most:.2f}, mean {mean:.2f}"
        last.append([kind, f"{told}; {ratio}", "", "", "", ""])
        print(*last[-1], flush=True)
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["kind", "plan", "layers_quantised", "predicted", "predicted_worst_head", "measured"]
        writer.writerow([*head, "about"])
        writer.writerows([*row, ""] for row in rows)
        writer.writerows([*row, about] for row in last)


if __name__ == "__main__":
    main()
