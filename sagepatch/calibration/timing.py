"""How long a call takes: its work on a CUDA GPU, and the host until it has queued it. Knows no
kernel.

A call of a few microseconds between two events on an idle GPU takes as long as the host needs to
queue it. So calls are queued behind a kernel that keeps the GPU busy until the host is done.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

# How long the host takes to queue a call, where that is not known yet.
HOST_US = 60.0
# The kernel that keeps the GPU busy lasts SPARE times as long as the host is expected to take.
# Where the host was slower still, the measurement is repeated with a wait LONGER times as long,
# TRIES times in all.
SPARE = 1.5
LONGER = 3.0
TRIES = 3
# Cycles that torch's sleeping kernel counts in a microsecond. On a GPU with lower clocks than this
# the wait is longer than asked for, which does no harm.
CYCLES_PER_US = 2000.0
# Between two events there are as many calls as last FILL_US together, MOST_CALLS at the most.
FILL_US = 1000.0
MOST_CALLS = 20
# Calls between two events in a first look, by how long a call takes: 4 below 300 us, 2 below
# 2000 us, else 1.
FIRST_CALLS = {300.0: 4, 2000.0: 2}
LONG_US = max(FIRST_CALLS)
# A time is the median of RUNS runs, of FEWEST_RUNS where RUNS would last longer than BUDGET_US.
RUNS = 3
FEWEST_RUNS = 2
BUDGET_US = 50_000.0

Run = Callable[[], object]


class CallTime(NamedTuple):
    """Microseconds of one call: its work on the GPU, and the host until it has queued it."""

    device_us: float
    host_us: float

    @property
    def us(self) -> float:
        """What one of many such calls takes, one after the other: the slower of the two."""
        return max(self)


def call_time(run: Run, device: torch.device, thorough: bool = True) -> CallTime:
    """The time of `run`, a call on the current stream of a CUDA device, warmed up: the median of a
    few runs, or one where a first look is enough.
    """
    with torch.cuda.device(device):
        around = _around(run, device)
        if around < 10 * LONG_US:
            around = min(around, _around(run, device))
        few = next((calls for most, calls in FIRST_CALLS.items() if around < most), 1)
        (first,), host = queued(run, device, 1, few)
        if not thorough:
            return CallTime(first, host)
        calls = max(1, min(MOST_CALLS, math.floor(FILL_US / max(first, 1e-3))))
        runs = FEWEST_RUNS if RUNS * calls * first > BUDGET_US else RUNS
        if around >= LONG_US:
            more, _ = queued(run, device, runs - 1, host_us=host)
            return CallTime(statistics.median([first, *more]), host)
        taken, host = queued(run, device, runs, calls, host_us=host)
    return CallTime(statistics.median(taken), host)


def _around(run: Run, device: torch.device) -> float:
    """Microseconds from an idle GPU to an idle GPU: more than the work."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e6


def queued(
    run: Run,
    device: torch.device,
    runs: int,
    calls: int = 1,
    between: Run | None = None,
    host_us: float = HOST_US,
) -> tuple[list[float], float]:
    """The GPU's time and the host's for one call of `run`, in microseconds: (one a run, host).

    Each of `runs` runs queues `calls` calls between two events. The host's time is the lower median
    over all calls, as a host is sometimes busy with other things; `host_us` is what it is expected
    to be. `between` is queued before each run and not counted.

    The GPU is kept busy until everything is queued. Where the host was too slow for that, all is
    done again with a longer wait, `TRIES` times. If none was long enough, or a call itself waits
    for the GPU so that none can be, it is done without a wait: that time is never less than the
    GPU's work.
    """
    wait_us = SPARE * runs * (calls * host_us + HOST_US)
    for _ in range(TRIES):
        taken, host, waited = _queued(run, device, runs, calls, between, wait_us)
        if waited:
            return taken, host
        wait_us *= LONGER
    taken, host, _ = _queued(run, device, runs, calls, between, 0.0)
    return taken, host


def _queued(
    run: Run, device: torch.device, runs: int, calls: int, between: Run | None, wait_us: float
) -> tuple[list[float], float, bool]:
    """As `queued`, once, behind a wait of `wait_us`. The third value is whether the wait was long
    enough: the GPU was still in it when the last call was queued.
    """
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(runs)
    ]
    host: list[float] = []
    torch.cuda._sleep(math.ceil(wait_us * CYCLES_PER_US))
    for start, end in pairs:
        if between is not None:
            between()
        start.record()
        for _ in range(calls):
            began = time.perf_counter()
            run()
            host.append(time.perf_counter() - began)
        end.record()
    waited = not pairs[0][0].query()
    torch.cuda.synchronize(device)
    taken = [float(start.elapsed_time(end)) * 1e3 / calls for start, end in pairs]
    return taken, statistics.median_low(host) * 1e6, waited
