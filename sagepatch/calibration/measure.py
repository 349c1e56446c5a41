"""Candidate kernels against the exact output of the same live call, and how long kernels take."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sagepatch.backends import load
from sagepatch.calibration.pieces import rows_of, spans, taken
from sagepatch.calibration.sample import HeadErrors
from sagepatch.numerics.metrics import Metrics, compare
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# Errors are taken over at most this many query rows, evenly spaced, and over so many numbers at a
# time: enough for a worst head, few launches, and double-precision copies below a layer's tensors.
COMPARED_ROWS = 512
COMPARED_NUMBERS = 1 << 22
# Emulations are measured on so many runs of so many query rows.
EMULATED_RUNS = 3
EMULATED_ROWS = 128
# One time is the median of up to so many runs; a long kernel is run fewer times.
TIMED_RUNS = 3
FEWEST_RUNS = 2
BUDGET_US = 50_000.0
# Each kernel is timed so often for one kind of call, the lower time counts; again only where it is
# within this factor of the fastest.
ROUNDS = 2
CLOSE = 1.25

Timer = Callable[[Callable[[], object], torch.device], float]


class Rows(NamedTuple):
    """The compared rows of a kernel's output and the exact ones, [B, H, rows, Dv] each."""

    out: Tensor
    exact: Tensor


def measured_rows(variant: Variant, call: Call, exact: Tensor) -> Rows:
    """Run `variant` on `call`, whose exact output is `exact` [B, Hq, Sq, Dv], and keep a sample of
    rows; the rest of the output is free again.

    An emulation, which is slow, runs on some of the query rows of a long call only.
    """
    kernel = load(variant.entry)
    if variant.toolchain == "emulated" and not call.packed:
        parts = spans(call.q.shape[2], EMULATED_RUNS, EMULATED_ROWS)
        out, wanted = kernel(rows_of(call, parts), variant.recipe)[0], taken(exact, parts)
    else:
        out, wanted = kernel(call, variant.recipe)[0], exact
    step = max(1, -(-out.shape[2] // COMPARED_ROWS))
    if step == 1:
        return Rows(out, wanted)
    return Rows(out[:, :, ::step].contiguous(), wanted[:, :, ::step])


def errors_of(measured: dict[str, Rows]) -> dict[str, HeadErrors]:
    """The errors of every head of some kernels' rows, by name; kernels with rows of the same size
    are compared together, a few heads at a time.
    """
    sizes: dict[torch.Size, list[str]] = {}
    for name, rows in measured.items():
        sizes.setdefault(rows.out.shape, []).append(name)
    found: dict[str, HeadErrors] = {}
    for size, names in sizes.items():
        outs = torch.cat([measured[name].out for name in names], 1)
        exacts = [measured[name].exact for name in names]
        heads = _by_heads(outs, exacts)
        for at, name in enumerate(names):
            found[name] = _errors(heads[at * size[1] : (at + 1) * size[1]])
    return {name: found[name] for name in measured}


def measure(variant: Variant, call: Call, exact: Tensor) -> HeadErrors:
    """Run `variant` on `call` and compare with `exact` [B, Hq, Sq, Dv]; nothing is timed."""
    return errors_of({variant.name: measured_rows(variant, call, exact)})[variant.name]


def head_errors(out: Tensor, exact: Tensor) -> HeadErrors:
    """The errors of each head of `out` against `exact`, both [B, Hq, Sq, Dv]."""
    return errors_of({"": Rows(out, exact)})[""]


def _errors(heads: tuple[Metrics, ...]) -> HeadErrors:
    return HeadErrors(
        all(head.finite for head in heads),
        tuple(head.cosine for head in heads),
        tuple(head.rel_l1 for head in heads),
        tuple(head.rmse for head in heads),
        tuple(head.norm_ratio for head in heads),
    )


def _by_heads(outs: Tensor, exacts: list[Tensor]) -> tuple[Metrics, ...]:
    """The metrics of each head of outs [B, K * H, S, D] by `compare`, those of `exacts` (K times
    [B, H, S, D]) one after the other, a few heads at a time.
    """
    B, many, S, D = outs.shape
    H = exacts[0].shape[1]
    group = max(1, COMPARED_NUMBERS // max(1, B * S * D))
    found: tuple[Metrics, ...] = ()
    for at in range(0, many, group):
        end = min(at + group, many)
        parts = [
            exacts[k][:, max(0, at - k * H) : min(H, end - k * H)]
            for k in range(at // H, (end - 1) // H + 1)
        ]
        wanted = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found += compare(outs[:, at:end], wanted).heads
    return found


def cuda_time_us(run: Callable[[], object], device: torch.device) -> float:
    """Median time of `run` on the current stream of a CUDA device in microseconds, by events,
    warmed up.
    """
    with torch.cuda.device(device):
        run()
        times: list[float] = []
        while len(times) < FEWEST_RUNS or (len(times) < TIMED_RUNS and sum(times) < BUDGET_US):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)


# Where times mean anything. An emulation's time says nothing about a kernel's.
TIMERS: dict[str, Timer] = {"cuda": cuda_time_us}


class Stopwatch:
    """Times of kernels by kind of call, shared by the layers of one patch.

    A kernel takes as long whatever the numbers in its tensors, so a time taken at one layer holds
    for all layers with such calls: timing costs a few calls a kernel, not a few a layer.
    """

    def __init__(self) -> None:
        self._times: dict[AttnSpec, dict[str, list[float]]] = {}

    def us(self, variant: Variant, call: Call, spec: AttnSpec) -> float | None:
        """Microseconds of `variant` on calls like `call`; None where nothing can be timed."""
        timer = TIMERS.get(spec.device)
        if timer is None:
            return None
        times = self._times.setdefault(spec, {})
        taken = times.setdefault(variant.name, [])
        if not taken or (len(taken) < ROUNDS and self._close(times, variant.name)):
            kernel = load(variant.entry)
            taken.append(timer(lambda: kernel(call, variant.recipe), call.q.device))
        return min(taken)

    @staticmethod
    def _close(times: dict[str, list[float]], name: str) -> bool:
        """Whether another round may change which kernel is the fastest."""
        return min(times[name]) <= CLOSE * min(min(found) for found in times.values() if found)
