"""A candidate kernel against the exact output of the same live call, and how long kernels take."""

from __future__ import annotations

import statistics
from collections.abc import Callable

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
COMPARED_ROWS = 1024
COMPARED_NUMBERS = 1 << 22
# Emulations are measured on so many runs of so many query rows.
EMULATED_RUNS = 3
EMULATED_ROWS = 128
# One time is the median of up to so many runs; a long kernel is run fewer times.
TIMED_RUNS = 5
FEWEST_RUNS = 2
BUDGET_US = 50_000.0
# Each kernel is timed so often for one kind of call; the lower time counts.
ROUNDS = 2

Timer = Callable[[Callable[[], object], torch.device], float]


def measure(variant: Variant, call: Call, exact: Tensor) -> HeadErrors:
    """Run `variant` on `call` and compare with `exact` [B, Hq, Sq, Dv]; nothing is timed.

    An emulation, which is slow, runs on some of the query rows of a long call only.
    """
    kernel = load(variant.entry)
    if variant.toolchain != "emulated" or call.packed:
        return head_errors(kernel(call, variant.recipe)[0], exact)
    parts = spans(call.q.shape[2], EMULATED_RUNS, EMULATED_ROWS)
    out, _ = kernel(rows_of(call, parts), variant.recipe)
    return head_errors(out, taken(exact, parts))


def head_errors(out: Tensor, exact: Tensor) -> HeadErrors:
    """The errors of each head of `out` against `exact`, both [B, Hq, Sq, Dv], over a sample of
    rows.
    """
    step = max(1, -(-out.shape[2] // COMPARED_ROWS))
    heads = _by_heads(out[:, :, ::step], exact[:, :, ::step])
    return HeadErrors(
        all(head.finite for head in heads),
        tuple(head.cosine for head in heads),
        tuple(head.rel_l1 for head in heads),
        tuple(head.rmse for head in heads),
        tuple(head.norm_ratio for head in heads),
    )


def _by_heads(out: Tensor, exact: Tensor) -> tuple[Metrics, ...]:
    """The metrics of each head by `compare`, a few heads at a time."""
    B, H, S, D = out.shape
    group = max(1, COMPARED_NUMBERS // max(1, B * S * D))
    parts = [
        compare(out[:, at : at + group], exact[:, at : at + group]) for at in range(0, H, group)
    ]
    return sum((part.heads for part in parts), ())


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
        self._times: dict[tuple[AttnSpec, str], list[float]] = {}

    def us(self, variant: Variant, call: Call, spec: AttnSpec) -> float | None:
        """Microseconds of `variant` on calls like `call`; None where nothing can be timed."""
        timer = TIMERS.get(spec.device)
        if timer is None:
            return None
        taken = self._times.setdefault((spec, variant.name), [])
        if len(taken) < ROUNDS:
            kernel = load(variant.entry)
            taken.append(timer(lambda: kernel(call, variant.recipe), call.q.device))
        return min(taken)
