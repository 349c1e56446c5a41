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

# The host queues a call in about so long, until that is known; what it is queued behind lasts so
# many times longer, and again so many times where the host was held up; so often.
HOST_US = 60.0
SPARE = 1.5
LONGER = 3.0
TRIES = 3
# What a kernel of torch's counts while a GPU does nothing: at clocks below this it lasts longer.
CYCLES_PER_US = 2000.0
# Calls between two events are so many that they last so long, up to a number.
FILL_US = 1000.0
MOST_CALLS = 20
# A first look takes fewer: so many of calls that take less than so long, one of longer ones.
FIRST_CALLS = {300.0: 4, 2000.0: 2}
LONG_US = max(FIRST_CALLS)
# One time is the median of up to so many runs; of long calls fewer.
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
    """Microseconds of the GPU's work of one call, in each of `runs` runs of `calls` calls, and of
    the host for one call, which takes about `host_us`: the (lower) median of all, as a host
    has other things to do. `between` is queued before each run and not counted.

    Where the host is held up so long that the GPU was done waiting, all is done again with a longer
    wait, a few times; after that, as where a call waits for the GPU itself, without any: what is
    read then is never less than the work.
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
    """As `queued`, once, behind `wait_us` microseconds; and whether the GPU waited for the host."""
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
