"""One measurement: a candidate kernel against the exact output of the same live call."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sagepatch.backends import load
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call
from sagepatch.variant import Variant

# Errors are taken over at most this many query rows, evenly spaced: enough for a worst head, and
# the double-precision copies stay small at 100k tokens.
COMPARED_ROWS = 4096
TIMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """A candidate on one call: each error at its worst over heads; `us` is None where nothing was
    timed.
    """

    variant: str
    finite: bool
    cosine: float
    rel_l1: float
    rmse: float
    norm_ratio: float
    worst_head: int
    us: float | None


def measure(variant: Variant, call: Call, exact: Tensor, *, timed: bool) -> Measurement:
    """Run `variant` on `call` and compare it with `exact` [B, Hq, Sq, Dv]."""
    out, _ = load(variant.entry)(call, variant.recipe)
    step = -(-out.shape[2] // COMPARED_ROWS) if out.shape[2] else 1
    comparison = compare(out[:, :, ::step], exact[:, :, ::step])
    worst = comparison.worst
    us = time_us(lambda: load(variant.entry)(call, variant.recipe)) if timed else None
    return Measurement(
        variant.name,
        worst.finite,
        worst.cosine,
        worst.rel_l1,
        worst.rmse,
        worst.norm_ratio,
        comparison.worst_head,
        us,
    )


def time_us(run: Callable[[], object]) -> float:
    """Median time of a call on the current CUDA stream in microseconds, by events, warmed up."""
    run()
    times = []
    for _ in range(TIMED_RUNS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
