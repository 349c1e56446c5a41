"""Times the modes of one model at one size in this process: unpatched, calibrated, the safe tier.

A child of h200_end_to_end.py: builds a model, says so, waits, and times the cases that it is told.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from end_to_end_watch import Instant, Watch, settled
from torch import Tensor, nn
from true_models import Case, Inputs

import sagepatch
from sagepatch.backends import load
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.reuse import stale
from sagepatch.calibration.timing import call_time
from sagepatch.patch import Patch
from sagepatch.plan import Plan
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# Relative error of the whole model's output, root mean square, above which no time is written.
MOST_ERROR = 0.3
UNPATCHED, SAFE = "unpatched", "safe"
# Watched twice.
SHORT_SECONDS = 1.0


@torch.no_grad()
def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    out = model(**inputs, return_dict=False)[0]
    assert isinstance(out, Tensor)
    return out


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error, root mean square; NaN where either is not finite."""
    difference, norm = (out.float() - reference.float()).norm(), reference.float().norm()
    return float(difference / norm)


@dataclass
class Way:
    """One mode of a case: a patch to put in force, or none, and what was seen with it."""

    name: str
    patch: Patch | None
    watch: Watch
    error: float = 0.0
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """The cases of one model; `tell` takes each row as it is found."""

    model: nn.Module
    device: str
    compiled: bool
    full: bool
    plans: Path | None
    tell: Callable[[str, dict[str, Any]], None]
    made: dict[str, Plan] = field(default_factory=dict)
    alone: dict[tuple[AttnSpec, str], float] = field(default_factory=dict)

    @property
    def emulate(self) -> bool:
        return self.device == "cpu"

    def inputs(self, make: Callable[[], Inputs]) -> Inputs:
        torch.manual_seed(1)
        with torch.device(self.device):
            found = make()
        if self.compiled and "input_ids" in found:
            # A cache is indexed by the number of the layer: one graph a layer.
            found["use_cache"] = False
        return found

    def set_up(self, cases: Sequence[Case]) -> None:
        """All that needs no quiet GPU: a first forward; compiling, for every size, with a patch and
        without (which patch makes no difference to a graph).
        """
        if not self.compiled:
            forward(self.model, self.inputs(cases[0].plan or cases[0].inputs))
            return
        # A graph a kind of block, size, and patched or not.
        torch._dynamo.config.recompile_limit = 64
        compile_blocks(self.model, cases[0])
        for case in cases:
            inputs = self.inputs(case.inputs)
            forward(self.model, inputs)
            with sagepatch.apply(self.model, variant=SAFE, emulate=self.emulate):
                forward(self.model, inputs)

    def run(self, case: Case) -> None:
        plan, calibrated_s = self.plan(case)
        kernels = Counter(entry.variant for entry in plan.entries)
        print(f"{case.name} calibrated in {calibrated_s:.1f} s: {dict(kernels)}", flush=True)
        inputs = self.inputs(case.inputs)

        def run() -> Tensor:
            return forward(self.model, inputs)

        planned = f"calibrated ({case.planned_on})" if case.plan else "calibrated"
        exact = self.applied(variant="exact")
        patches = {planned: self.applied(plan=plan), SAFE: self.applied(variant=SAFE)}
        reference = run()
        settled(self.device)
        began = time.perf_counter()
        ways = [Way(UNPATCHED, None, self.looked(exact, run, False)[1])]
        settled(self.device)
        again = time.perf_counter() - began < SHORT_SECONDS
        for name, patch in patches.items():
            out, watch = self.looked(patch, run, again)
            ways.append(Way(name, patch, watch, error(out, reference)))
        del reference
        # What stands now stays: collecting garbage between forwards would look through all of it.
        gc.collect()
        gc.freeze()
        for round_ in range(case.rounds):
            # Each way goes first in turn: what drifts meanwhile cancels.
            for place in range(len(ways)):
                self.timed(ways[(round_ + place) % len(ways)], run)
        gc.unfreeze()
        for way in ways:
            self.report(case, way, ways[0], calibrated_s)

    def plan(self, case: Case) -> tuple[Plan, float]:
        """The plan of two forwards, as many as a plan needs, and the seconds that it took: 0 where
        it was made before.
        """
        key = case.planned_on or case.name
        path = None if self.plans is None else self.plans / f"{case.build.__name__}-{key}.json"
        if key not in self.made and path is not None and path.exists():
            plan = Plan.load(path)
            if not any(stale(entry) for entry in plan.entries):
                self.made[key] = plan
        if key in self.made:
            return self.made[key], 0.0
        inputs = self.inputs(case.plan or case.inputs)

        def twice() -> None:
            for _ in range(2):
                forward(self.model, inputs)

        began = time.monotonic()
        table = sagepatch.calibrate(self.model, run=twice, emulate=self.emulate)
        self.made[key] = plan = table.plan()
        took = time.monotonic() - began
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            plan.save(path)
        first = table.layers[0].rows[-1]
        times = {name: one.us for name, one in first.errors.items()}
        print(f"{first.shape}: exact {first.us_exact} us, {times}", flush=True)
        return plan, took

    def applied(self, **how: Any) -> Patch:
        """A patch that is not in force yet."""
        patch = sagepatch.apply(self.model, **how, emulate=self.emulate)
        patch.restore()
        return patch

    def looked(self, patch: Patch, run: Callable[[], Tensor], again: bool) -> tuple[Tensor, Watch]:
        """One forward, watched, after which nothing has to be made ready for this patch; with
        `again` the second one of two, as in the first each layer makes its guard.
        """
        patch.install()
        try:
            for _ in range(1 + again):
                watch = Watch(self.device)
                out = watch.over(patch, run)
        finally:
            patch.restore()
        return out, watch

    def timed(self, way: Way, run: Callable[[], Tensor]) -> None:
        """Append the milliseconds of one forward, and those after which the host was free again."""
        if way.patch is not None:
            way.patch.install()
        gc.disable()
        start = Instant(self.device)
        run()
        end = Instant(self.device)
        way.times.append(end.ms_since(start))
        way.host.append(1e3 * (end.at - start.at))
        gc.enable()
        if way.patch is not None:
            way.patch.restore()

    def us(self, variant: Variant, call: Call, spec: AttnSpec) -> float:
        """Microseconds of a kernel alone on one call."""
        key = (spec, variant.name)
        if key not in self.alone:
            kernel = load(variant.entry)
            run, device = partial(kernel, call, variant.recipe), call.q.device
            on_gpu = self.device == "cuda"
            self.alone[key] = call_time(run, device).us if on_gpu else host_time_us(run, device)
        return self.alone[key]

    def alone_ms(self, watch: Watch, always: Variant | None = None) -> float:
        """All attention calls of a forward, each kind timed alone, by the kernels that served them
        or always by the same one.
        """
        return sum(
            count * self.us(always or variant, watch.kinds[spec], spec) / 1e3
            for (spec, variant), count in watch.counts.items()
        )

    def report(self, case: Case, way: Way, unpatched: Way, calibrated_s: float) -> None:
        """Tell the row of one way, and where its time goes."""
        before, median = statistics.median(unpatched.times), statistics.median(way.times)
        p20, p80 = quantiles(way.times)
        alone_ms = self.alone_ms(way.watch)
        saved_ms = self.alone_ms(way.watch, SDPA) - alone_ms
        ratios = [a / b for a, b in zip(unpatched.times, way.times, strict=True)]
        facts = {
            "model": case.label(self.full),
            "mode": way.name,
            "compile": self.compiled,
        }
        fallbacks: Counter[str] = Counter()
        for layer in way.patch.layers if way.patch is not None else ():
            layer.ask_guards()
            fallbacks += Counter(layer.record.fallbacks)
            fallbacks += Counter([f"demoted: {layer.demoted}"] if layer.demoted else [])
        if not way.error < MOST_ERROR:
            print(f"{facts}: off by {way.error:.4f}, not written", flush=True)
            return
        self.tell(
            "row",
            facts
            | {
                "ms_median": f"{median:.2f}",
                "ms_p20": f"{p20:.2f}",
                "ms_p80": f"{p80:.2f}",
                "speedup": f"{before / median:.3f}",
                "predicted_speedup": f"{before / (before - saved_ms):.3f}",
            },
        )
        low, high = quantiles(ratios)
        self.tell(
            "parts",
            facts
            | {
                "forwards": len(way.times),
                "speedup_p20": f"{low:.3f}",
                "speedup_p80": f"{high:.3f}",
                "attention_ms": f"{way.watch.in_place_ms:.2f}",
                "attention_alone_ms": f"{alone_ms:.2f}",
                "host_ms": f"{statistics.median(way.host):.2f}",
                "calibration_s": f"{calibrated_s:.1f}" if way.name.startswith("cal") else "",
                "rel_error": f"{way.error:.4f}",
                "kernels": "; ".join(kernels_of(way.watch)),
                "fallbacks": "; ".join(f"{why} ({n})" for why, n in fallbacks.items()),
            },
        )
        print(f"{case.name} {way.name}: {[round(t, 1) for t in way.times]}", flush=True)


def kernels_of(watch: Watch) -> list[str]:
    """How many calls each kernel served, the most first."""
    counts: Counter[str] = Counter()
    for (_, variant), count in watch.counts.items():
        counts[variant.name] += count
    return [f"{count} {name}" for name, count in counts.most_common()]


def quantiles(numbers: list[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile."""
    low, high = torch.quantile(torch.tensor(numbers), torch.tensor([0.2, 0.8])).tolist()
    return low, high


def host_time_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one run on a CPU, for a rehearsal."""
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def compile_blocks(model: nn.Module, case: Case) -> None:
    """Compile each block by itself: equal blocks share their graphs."""
    for module in model.modules():
        if type(module).__name__ in case.blocks:
            module.compile(dynamic=False)


def built(case: Case, full: bool, device: str) -> nn.Module:
    """The model in bf16, its weights drawn on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return case.build(full).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def freed(device: str) -> None:
    gc.collect()
    settled(device)
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="true_models", help="the module that holds CASES")
    parser.add_argument("--only", nargs="+", required=True, help="cases of one model, by name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--full-depth", action="store_true")
    parser.add_argument("--plans", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    every = importlib.import_module(args.cases).CASES
    cases = {case.name: case for case in every if case.name in args.only}

    def tell(kind: str, row: dict[str, Any]) -> None:
        print(f"{kind.upper()} {json.dumps(row)}", flush=True)

    first = next(iter(cases.values()))
    model = built(first, args.full_depth, args.device)
    made_s = time.monotonic() - began
    bench = Bench(model, args.device, args.compile, args.full_depth, args.plans, tell)
    bench.set_up(list(cases.values()))
    freed(args.device)
    print(f"built in {made_s:.1f} s, ran in {time.monotonic() - began - made_s:.1f} s", flush=True)
    print("READY", flush=True)
    for line in sys.stdin:
        try:
            bench.run(cases[line.strip()])
        except torch.OutOfMemoryError as error:
            print(f"{line.strip()}: {error}", flush=True)
        bench.alone.clear()
        freed(args.device)
        print("DONE", flush=True)


if __name__ == "__main__":
    main()
