"""The ablations on kernels: what they make of the settings of ablations.py on a GPU, beside their
emulator and against FP64. Arithmetic, not speed: on sm_90 E4M3 and INT4 products of mma.sync are
emulated by the compiler.

    python benchmarks/ablations_gpu.py [--data NAME ...]

Writes benchmarks/ablations_gpu.csv, or `--out FILE`, each row as it comes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ablations import (
    SEEDS,
    Data,
    Setting,
    biased_q,
    demo,
    depths,
    four_bits,
    lifted,
    outliers,
    peaked,
    products,
    row_sums,
    splits,
)
from numerics_table import normal
from torch import Tensor

from sagepatch.backends.cuda import attention as hopper
from sagepatch.backends.cuda import attention_tiles, prepass_form
from sagepatch.backends.cuda_mma import attention as mma
from sagepatch.backends.cuda_mma import tiles
from sagepatch.bench.document import code
from sagepatch.env import Machine
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

COMMAND = "python benchmarks/ablations_gpu.py"
NAMES = ("normal", "outliers", "demo", "V + 3", "Q + 3", "peaked", "peaked, V + 3")
# Of the demo all layers of the first step.
DEMO_CALLS = 11
# Kernels that are compiled side by side.
WORKERS = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes a setting: a toolchain, and the type that it takes calls in."""

    toolchain: str
    recipe: Recipe
    dtype: torch.dtype

    def __call__(self, call: Call) -> Tensor:
        run = mma.run if self.toolchain == "cuda_mma" else hopper.run
        return run(self.fed(call), self.recipe)[0]

    def fed(self, call: Call) -> Call:
        """The call as the kernel takes it."""
        q, k, v = (t.to(self.dtype) for t in (call.q, call.k, call.v))
        return replace(call, q=q, k=k, v=v)


def kernel(setting: Setting) -> Kernel | None:
    """The kernel that computes a setting, None where none does: the mma.sync ones in FP32, so that
    no rounding of inputs or output is part of the error; for row sums of codes Hopper's, which sum
    on the tensor core.
    """
    recipe = setting.recipe
    if recipe.sum_quantised_p:
        recipe = replace(recipe, sum_quantised_p=False)
        if attention_tiles.refusal(recipe, 128, 128) is not None:
            return None
        sums = all(attention_tiles.pick(recipe, dim, dim).ones for dim in (64, 128))
        return Kernel("cuda", recipe, torch.float16) if sums else None
    if tiles.refusal(recipe, 128, 128) is None and prepass_form.refusal(recipe) is None:
        return Kernel("cuda_mma", recipe, torch.float32)
    return None


def settings() -> list[tuple[Setting, Kernel]]:
    """Those that a kernel computes."""
    wanted = (*depths(), *products(), *splits(), *four_bits(), *row_sums())
    return [(one, found) for one in wanted if (found := kernel(one)) is not None]


def data(demo_calls: int) -> dict[str, Iterator[Call]]:
    """The calls of ablations.py by data set, made when they are asked for."""
    return {
        "normal": (normal(seed=seed) for seed in SEEDS),
        "outliers": map(outliers, SEEDS),
        "demo": itertools.islice(demo(), demo_calls),
        "V + 3": (lifted(normal(seed=seed)) for seed in SEEDS),
        "Q + 3": map(biased_q, SEEDS),
        "peaked": map(peaked, SEEDS),
        "peaked, V + 3": (lifted(peaked(seed)) for seed in SEEDS),
    }


def on_gpu(call: Call) -> Call:
    """The call on the GPU."""
    return replace(call, q=call.q.cuda(), k=call.k.cuda(), v=call.v.cuda())


def compile_all(chosen: list[tuple[Setting, Kernel]]) -> None:
    """Run every kernel once on a small call of each head size, side by side."""
    small = [on_gpu(normal((1, 1, 128, dim))) for dim in (128, 64)]
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = [pool.submit(run, call) for _, run in chosen for call in small]
        for one in waiting:
            one.result()


def row(setting: Setting, run: Kernel, data: Data) -> dict[str, str]:
    """Kernel and emulator of one setting on one data set."""
    ours, twins, apart = [], [], []
    for call, reference in zip(data.calls, data.references, strict=True):
        out = run(call).float()
        twin = emulate(run.fed(call), setting.recipe)[0].float()
        ours.append(compare(out, reference).whole.rel_l1)
        twins.append(compare(twin, reference).whole.rel_l1)
        apart.append(compare(out, twin).worst.rel_l1)
    return {
        "ablation": setting.ablation,
        "setting": setting.name,
        "data": data.name,
        "calls": str(len(data.calls)),
        "kernel": run.toolchain,
        "kernel_rel_l1": f"{statistics.mean(ours):.5f}",
        "emulated_rel_l1": f"{statistics.mean(twins):.5f}",
        "apart_rel_l1_worst_head": f"{max(apart):.2e}",
    }


def machine() -> dict[str, str]:
    """The columns that all rows share."""
    here = Machine.here()
    return {
        "gpu": here.gpu_name,
        "driver": here.driver or "",
        "versions": f"torch {here.versions['torch']}, CUDA {here.cuda}",
        "sources": code()["sources"],
        "command": COMMAND,
    }


def main() -> None:
    """Compile side by side, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".csv"))
    parser.add_argument("--demo-calls", type=int, default=DEMO_CALLS)
    parser.add_argument("--data", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    began = time.monotonic()
    chosen, shared = settings(), machine()
    compile_all(chosen)
    print(f"{len(chosen)} settings compiled after {time.monotonic() - began:.1f} s", flush=True)
    with arguments.out.open("w", newline="", encoding="utf-8") as file:
        writer: Any = None
        sets = data(arguments.demo_calls)
        for name in arguments.data:
            found = Data.of(name, map(on_gpu, sets[name]))
            for setting, run in chosen:
                if found.name not in setting.data:
                    continue
                made = row(setting, run, found) | shared
                if writer is None:
                    writer = csv.DictWriter(file, made.keys())
                    writer.writeheader()
                writer.writerow(made)
                file.flush()
            print(f"{found.name}: after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
