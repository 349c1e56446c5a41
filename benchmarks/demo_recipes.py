"""Every recipe on the demo pipeline, emulated: how far its picture is from the exact one.

    python benchmarks/demo_recipes.py

Writes benchmarks/demo_recipes.csv. Runs on a CPU; it measures accuracy, not speed.
"""

from __future__ import annotations

import csv
import platform
from pathlib import Path

import torch

import sagepatch
from sagepatch.backends.catalogue import EMULATED
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine
from sagepatch.report.pictures import Comparison

PROMPTS = ("a red apple", "a blue dress", "a bullet train")
COMMAND = "python benchmarks/demo_recipes.py"


def draw(pipe: object, prompt: str) -> object:
    """One picture at the demo's defaults, seed 0."""
    arguments = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__dataclass_fields__}
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe(prompt, generator=generator, **arguments).images[0]  # type: ignore[operator]


def main() -> None:
    """Measure every recipe on every prompt; the worst prompt goes into the table."""
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    exact = [draw(pipe, prompt) for prompt in PROMPTS]
    machine = Machine.here()
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items() if found)
    rows = []
    for variant in EMULATED:
        with sagepatch.apply(pipe, variant=variant.name):
            pictures = [draw(pipe, prompt) for prompt in PROMPTS]
        scores = [Comparison.of([a], [b]) for a, b in zip(exact, pictures, strict=True)]
        rows.append(
            {
                "recipe": variant.recipe.name,
                "tier": variant.tier,
                "psnr_db_worst": f"{min(s.psnr_db for s in scores):.1f}",
                "psnr_db_mean": f"{sum(s.psnr_db for s in scores) / len(scores):.1f}",
                "ssim_worst": f"{min(s.ssim for s in scores):.4f}",
                "prompts": "; ".join(PROMPTS),
                "device": f"CPU ({platform.machine()})",
                "versions": versions,
                "command": COMMAND,
            }
        )
        print(rows[-1]["recipe"], rows[-1]["psnr_db_worst"], flush=True)
    path = Path(__file__).with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
