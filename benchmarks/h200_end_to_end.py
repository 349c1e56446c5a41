"""Times one forward of true architectures (random weights, bf16) unpatched, with the safe tier
everywhere and calibrated, in one run, and writes benchmarks/h200_end_to_end.csv row by row.

    python benchmarks/h200_end_to_end.py --out benchmarks/h200_end_to_end.csv [--seconds 200]

Denoisers without text encoder and VAE, a language model's reading of a prompt. `speedup` is over
torch's default attention in the same process. `predicted_speedup` takes, from the unpatched time,
what each layer's kernel alone saves on the live calls of the warm-up. "calibrated" is the plan at
the default threshold; where one forward takes seconds, that of smaller inputs, and the mode says
which. A time is written only after the output agreed with the unpatched one.
"""

from __future__ import annotations

import argparse
import csv
import gc
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from true_models import CASES, Case, Inputs

import sagepatch
from sagepatch.backends import load
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.measure import cuda_time_us
from sagepatch.env import VERSION, nvidia_driver
from sagepatch.layer import PatchedLayer
from sagepatch.plan import Plan
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

COLUMNS = (
    *("model", "mode", "compile", "ms_median", "ms_p20", "ms_p80", "speedup", "predicted_speedup"),
    *("gpu", "driver", "cuda", "torch", "sagepatch", "commit", "command"),
)
DEVICE = "cuda"
# Relative error of the whole model's output, root mean square, above which no time is written.
MOST_ERROR = 0.3


@dataclass
class Clock:
    """Observes every call of a forward: times exact attention and the layer's own kernel on it,
    once a kind of call, and lets the layer serve it.
    """

    times: dict[tuple[AttnSpec, str], float] = field(default_factory=dict)
    saved_us: float = 0.0

    def observe(self, layer: PatchedLayer, call: Call) -> None:
        spec = call.spec()
        variant, _ = layer.choose(spec)
        self.saved_us += self.us(SDPA, call, spec) - self.us(variant, call, spec)

    def us(self, variant: Variant, call: Call, spec: AttnSpec) -> float:
        key = (spec, variant.name)
        if key not in self.times:
            kernel = load(variant.entry)
            self.times[key] = cuda_time_us(lambda: kernel(call, variant.recipe), call.q.device)
        return self.times[key]

    @contextmanager
    def watching(self, patch: sagepatch.Patch) -> Iterator[None]:
        self.saved_us = 0.0
        for layer in patch.layers:
            layer.observer = self.observe
        yield
        for layer in patch.layers:
            layer.observer = None


@torch.no_grad()
def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    out = model(**inputs, return_dict=False)[0]
    assert isinstance(out, Tensor)
    return out


def timed(run: Callable[[], Tensor], repeats: int) -> tuple[list[float], Tensor]:
    """Milliseconds of each of `repeats` forwards, by events, and the output of the last."""
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return found, out


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error, root mean square; NaN where either is not finite."""
    difference, norm = (out.float() - reference.float()).norm(), reference.float().norm()
    return float(difference / norm)


@dataclass
class Bench:
    """The modes of one case on one model; `write` takes each row as it is found."""

    case: Case
    full: bool
    model: nn.Module
    write: Callable[[dict[str, Any]], None]
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        with torch.device(DEVICE):
            self.inputs = self.case.inputs()
            self.small = self.inputs if self.case.small is None else self.case.small()

    def run(self) -> None:
        plan = self.calibrate()
        if self.case.compiled:
            self.model.compile_repeated_blocks(fullgraph=True)
        forward(self.model, self.small)
        times, self.reference = timed(self.forward, self.case.repeats)
        self.unpatched_ms = self.row("unpatched", times, None)
        name = f"calibrated ({self.case.small_name})" if self.case.small_name else "calibrated"
        self.mode(name, plan=plan)
        self.mode("safe", variant="safe")

    def calibrate(self) -> Plan:
        """The plan of two forwards, as many as a plan needs."""

        def twice() -> None:
            for _ in range(2):
                forward(self.model, self.small)

        began = time.monotonic()
        plan = sagepatch.calibrate(self.model, run=twice).plan()
        kernels = Counter(entry.variant for entry in plan.entries)
        print(f"  calibrated in {time.monotonic() - began:.1f} s: {dict(kernels)}", flush=True)
        return plan

    def forward(self) -> Tensor:
        return forward(self.model, self.inputs)

    def mode(self, name: str, **how: Any) -> None:
        with sagepatch.apply(self.model, **how) as patch:
            with self.clock.watching(patch):
                self.forward()
            predicted_ms = self.unpatched_ms - self.clock.saved_us / 1e3
            times, out = timed(self.forward, self.case.repeats)
            off = error(out, self.reference)
            if off < MOST_ERROR:
                self.row(name, times, predicted_ms)
            fallbacks = sum((layer.record.fallbacks for layer in patch.layers), Counter())
            print(f"  off by {off:.4f}; fell back: {dict(fallbacks)}; {times}", flush=True)

    def row(self, mode: str, times: list[float], predicted_ms: float | None) -> float:
        """Write one row; its median."""
        points = torch.tensor([0.2, 0.5, 0.8])
        p20, median, p80 = torch.quantile(torch.tensor(times), points).tolist()
        before = median if predicted_ms is None else self.unpatched_ms
        predicted = 1.0 if predicted_ms is None else before / predicted_ms
        self.write(
            {
                "model": self.case.label(self.full),
                "mode": mode,
                "compile": self.case.compiled,
                "ms_median": f"{median:.2f}",
                "ms_p20": f"{p20:.2f}",
                "ms_p80": f"{p80:.2f}",
                "speedup": f"{before / median:.3f}",
                "predicted_speedup": f"{predicted:.3f}",
            }
        )
        return float(median)


def built(case: Case, full: bool) -> nn.Module:
    """The model in bf16 on the GPU, its weights drawn there."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return case.build(full).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def commit() -> str:
    """The commit that this file is from, "" outside a repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_end_to_end.csv")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, or their beginnings")
    parser.add_argument("--full-depth", action="store_true")
    parser.add_argument("--commit", default=commit())
    args = parser.parse_args()
    began = time.monotonic()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "sagepatch": VERSION,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    path = Path(args.out)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()

        def write(row: dict[str, Any]) -> None:
            print(" ".join(str(value) for value in row.values()), flush=True)
            writer.writerow({**row, **facts})
            file.flush()

        model, made = None, None
        for case in CASES:
            elapsed = time.monotonic() - began
            if args.only and not case.name.startswith(tuple(args.only)):
                continue
            if elapsed + case.seconds > args.seconds:
                print(f"{case.name}: left out after {elapsed:.0f} s", flush=True)
                continue
            print(f"{case.name}, after {elapsed:.0f} s", flush=True)
            if case.build is not made:
                model = None
                gc.collect()
                torch.cuda.empty_cache()
                model, made = built(case, args.full_depth), case.build
            assert model is not None
            try:
                Bench(case, args.full_depth, model, write).run()
            except torch.OutOfMemoryError as error:
                print(f"{case.name}: {error}", flush=True)


if __name__ == "__main__":
    main()
