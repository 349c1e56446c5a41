"""The ablations on kernels: what the cuda_mma kernels make of some settings of ablations.py on a
GPU, beside their emulator and against FP64. Arithmetic, not speed: on sm_90 E4M3 and INT4 products
of mma.sync are emulated by the compiler.

    python benchmarks/ablations_gpu.py

Writes benchmarks/ablations_gpu.csv, or `--out FILE`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from ablations import Setting, demo, depths, four_bits, outliers, products, splits
from numerics_table import normal
from torch import Tensor

from sagepatch.backends.cuda import prepass_form
from sagepatch.backends.cuda_mma import tiles
from sagepatch.backends.cuda_mma.attention import run
from sagepatch.bench.document import code
from sagepatch.env import Machine
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call

COMMAND = "python benchmarks/ablations_gpu.py"
# Of the sweeps, every second product and the paper's splits.
PRODUCTS = ("2016", "504", "126", "50")
SPLITS = ("448, 2.25", "224, 4.5", "112, 9", "448, 448, FP32 sums")
# Calls of the demo: all layers of one step.
DEMO_CALLS = 11
# Kernels that are compiled side by side.
WORKERS = 8


def settings() -> list[Setting]:
    """Those that the kernels compute."""
    wanted = [
        *depths(),
        *(one for one in products() if one.name in PRODUCTS),
        *(one for one in splits() if one.name in SPLITS),
        *four_bits(),
    ]
    return [
        one
        for one in wanted
        if tiles.refusal(one.recipe, 128, 128) is None and prepass_form.refusal(one.recipe) is None
    ]


def data() -> Iterator[tuple[str, list[Call]]]:
    """Normal, outliers and the demo's calls, as ablations.py has them, on the GPU."""
    yield "normal", [on_gpu(normal())]
    yield "outliers", [on_gpu(outliers(0))]
    yield "demo", [on_gpu(call) for call in itertools.islice(demo(), DEMO_CALLS)]


def on_gpu(call: Call) -> Call:
    """The call on the GPU, in FP32: no rounding of inputs or output is part of the error."""
    return replace(call, q=call.q.cuda(), k=call.k.cuda(), v=call.v.cuda())


def row(setting: Setting, name: str, each: list[Call], references: list[Tensor]) -> dict[str, str]:
    """Kernel and emulator of one setting on one data set."""
    ours, twins, apart = [], [], []
    for call, reference in zip(each, references, strict=True):
        out = run(call, setting.recipe)[0]
        twin = emulate(call, setting.recipe)[0]
        ours.append(compare(out, reference).whole.rel_l1)
        twins.append(compare(twin, reference).whole.rel_l1)
        apart.append(compare(out, twin).worst.rel_l1)
    machine = Machine.here()
    return {
        "ablation": setting.ablation,
        "setting": setting.name,
        "data": name,
        "calls": str(len(each)),
        "kernel_rel_l1": f"{statistics.mean(ours):.5f}",
        "emulated_rel_l1": f"{statistics.mean(twins):.5f}",
        "apart_rel_l1_worst_head": f"{max(apart):.2e}",
        "gpu": machine.gpu_name,
        "driver": machine.driver or "",
        "versions": f"torch {machine.versions['torch']}, CUDA {machine.cuda}",
        "sources": code()["sources"],
        "command": COMMAND,
    }


def main() -> None:
    """Compile side by side, then measure; each row is written as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    chosen = settings()
    with parser.parse_args().out.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for name, each in data():
            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(lambda one, call=each[0]: run(call, one.recipe), chosen))
            references = [exact(call, torch.float64)[0] for call in each]
            for setting in chosen:
                if name not in setting.data:
                    continue
                made = row(setting, name, each, references)
                print(*list(made.values())[:7], flush=True)
                if writer is None:
                    writer = csv.DictWriter(file, made.keys())
                    writer.writeheader()
                writer.writerow(made)
                file.flush()


if __name__ == "__main__":
    main()
