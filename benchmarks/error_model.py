"""How well per-layer errors predict the error of the picture: random plans on the demo pipeline,
emulated, predicted and measured.

    python benchmarks/error_model.py [--plans 40]

Writes benchmarks/error_model.csv; its last row holds the rank correlations. Runs on a CPU. The
measured error is that of the final latents, relative to those of exact attention, root mean square.
"""

from __future__ import annotations

import argparse
import csv
import platform
import random
import sys
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import sagepatch
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import capture
from sagepatch.calibration.solve import combined, relative_error
from sagepatch.calibration.table import Calibration
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine
from sagepatch.plan import Plan

RECIPES = ("sage2_8", "sage1_vb", "sage2_4", "sage1_b")
PROMPT = "a red apple"


def latents(pipe: Any) -> torch.Tensor:
    """The final latents of one run at the demo's defaults, seed 0."""
    arguments = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__dataclass_fields__}
    generator = torch.Generator("cpu").manual_seed(0)
    found: torch.Tensor = pipe(
        PROMPT, generator=generator, output_type="latent", **arguments
    ).images
    return found.double()


def random_plan(calibration: Calibration, chance: random.Random) -> tuple[Plan, float]:
    """A plan that quantises some layers, each by any recipe, and its predicted error."""
    share = chance.random()
    entries, errors = [], []
    for layer in calibration.layers:
        names = [name for name, summary in layer.candidates.items() if summary.finite]
        name = chance.choice(names) if chance.random() < share else SDPA.name
        entries.append(layer.entry_of(name, "drawn at random", ()))
        if name != SDPA.name:
            errors.append(relative_error(layer.candidates[name].cosine_mean))
    whole = calibration.plan(threshold=0.0)
    plan = Plan(
        whole.fingerprint,
        whole.model,
        0.0,
        whole.emulated,
        whole.gpu,
        whole.versions,
        tuple(entries),
    )
    return plan, combined(errors)


def main() -> None:
    """Measure, draw plans, run each, write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=40)
    count = parser.parse_args().plans
    capture.EMULATED_RECIPES = RECIPES
    capture.MOST_OF_TIER = {"fast": 3, "safe": 1}
    assert all(f"emulated.{name}" in BY_NAME for name in RECIPES)
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    exact = latents(pipe)
    calibration = sagepatch.calibrate(pipe, run=lambda: latents(pipe), emulate=True)
    chance = random.Random(0)
    rows = []
    for number in range(count):
        plan, predicted = random_plan(calibration, chance)
        with sagepatch.apply(pipe, plan=plan, emulate=True):
            off = latents(pipe) - exact
        measured = float(off.norm() / exact.norm())
        quantised = sum(entry.variant != SDPA.name for entry in plan.entries)
        rows.append([number, quantised, f"{predicted:.5f}", f"{measured:.5f}"])
        print(*rows[-1], flush=True)
    versions = ", ".join(f"{n} {v}" for n, v in Machine.here().versions.items() if v)
    ranks = spearmanr([float(row[2]) for row in rows], [float(row[3]) for row in rows]).statistic
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["plan", "layers_quantised", "predicted", "measured", "about"])
        writer.writerows([*row, ""] for row in rows)
        about = (
            f"rank correlation (Spearman) of {count} plans on {len(calibration.layers)} layers; "
            f"CPU ({platform.machine()}), {versions}; python {' '.join(sys.argv)}"
        )
        writer.writerow(["all", "", "", f"{ranks:.3f}", about])
    print("rank correlation", ranks)


if __name__ == "__main__":
    main()
