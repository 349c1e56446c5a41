"""Holds the predictions of machine_code_report.py against what was measured on an H200.

    python benchmarks/machine_code_judge.py MEASURED.csv [...] [--out FILE]

Run it in the checkout that was measured: it counts the machine code of the kernels there. Writes
benchmarks/machine_code_judged.csv, one row a kernel and head size: the faster of two long shapes.
Rows of kernels that are not in the tables given stay.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from gpu_rates import GPUS
from machine_code_report import hopper, mma, row

from sagepatch.backends.cuda.build import compile_program
from sagepatch.numerics.recipe import RECIPES

# Long and full: nothing but the main loop matters.
LONG = {64: ("cogvideox_2b", "d64_16k"), 128: ("d128_16k", "hunyuan_33k")}
FAMILIES = {"cuda": hopper, "cuda_mma": mma}
(H200,) = (gpu for gpu in GPUS if gpu.name == "H200")


def best(paths: list[Path]) -> dict[tuple[str, int], dict[str, str]]:
    """The fastest row of each kernel and head size on its long shapes."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for one in csv.DictReader(file):
                for head_dim, shapes in LONG.items():
                    key = (one["variant"], head_dim)
                    ours = one["variant"].split(".")[0] in FAMILIES
                    if not ours or one["shape"] not in shapes or not one["tflops"]:
                        continue
                    if key not in found or float(one["tflops"]) > float(found[key]["tflops"]):
                        found[key] = one | {"csv": path.name}
    return found


def judged(kernel: str, head_dim: int, measured: dict[str, str]) -> dict[str, Any]:
    """One row: predicted and measured."""
    family, _, recipe = kernel.partition(".")
    subject = FAMILIES[family](RECIPES[recipe], head_dim, H200)
    predicted = row(subject, compile_program(subject.program))
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        "predicted_tops": predicted["predicted_tops"],
        "predicted_tops_without_overlap": predicted["predicted_tops_without_overlap"],
        "bound": predicted["bound"],
        "measured_tflops": f"{float(measured['tflops']):.0f}",
        "shape": measured["shape"],
        "measured_in": measured["csv"],
        "gpu": measured["gpu"],
        "commit": measured["commit"],
        "nvrtc": predicted["nvrtc"],
        "command": "python benchmarks/machine_code_judge.py " + measured["csv"],
    }


def main() -> None:
    """Compile, count, compare and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("machine_code_judged.csv")
    )
    given = parser.parse_args()
    rows = [judged(*key, one) for key, one in best(given.measured).items()]
    if given.out.exists():
        with given.out.open(newline="", encoding="utf-8") as file:
            new = {row["kernel"] for row in rows}
            rows += [row for row in csv.DictReader(file) if row["kernel"] not in new]
    rows.sort(key=lambda r: (r["kernel"].split(".")[0], int(r["head_dim"])))
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
