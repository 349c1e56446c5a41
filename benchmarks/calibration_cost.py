"""What a calibration costs against a generation: the demo pipeline, emulated on a CPU or on a GPU.

    python benchmarks/calibration_cost.py [--device cpu] [--rounds 3]

Writes benchmarks/calibration_cost.csv: a row a number of steps and round: the generation's own time
and the measuring's, both of the same run, and the steps that were measured. What is done once
(compiling, checking and timing kernels) is in a GPU's first round.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import sagepatch
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine

STEPS = (4, 8, 28)


def main() -> None:
    """Calibrate on generations of a few lengths and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    emulated = options.device == "cpu"
    pipe = load_pipeline(torch.float32 if emulated else torch.bfloat16, options.device)
    pipe.set_progress_bar_config(disable=True)

    def draw(steps: int) -> None:
        arguments = {**asdict(DEFAULTS), "num_inference_steps": steps}
        generator = torch.Generator("cpu").manual_seed(0)
        pipe("a red apple", generator=generator, output_type="latent", **arguments)

    here = Machine.here()
    versions = ", ".join(f"{name} {v}" for name, v in here.versions.items() if v)
    about = (
        f"{here.gpu_name}, {platform.machine()}, {torch.get_num_threads()} threads; {versions}; "
        f"python {' '.join(sys.argv)}"
    )
    rows = []
    for steps in STEPS:
        draw(steps)
        for number in range(1, options.rounds + 1):
            made = sagepatch.calibrate(pipe, run=lambda n=steps: draw(n), emulate=emulated)
            measured = " ".join(str(row.step) for row in made.layers[0].rows)
            own, spent = made.run_seconds, made.measuring_seconds
            rows.append(
                [steps, number, f"{own:.3f}", f"{spent:.3f}", f"{spent / own:.2f}", measured]
            )
            print(*rows[-1], flush=True)
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["steps", "round", "run_s", "measuring_s", "ratio", "measured_steps", "about"]
        writer.writerow(head)
        writer.writerows([*row, about] for row in rows)


if __name__ == "__main__":
    main()
