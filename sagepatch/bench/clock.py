"""Time: how much of the budget is left, and how long a call takes on a GPU. Knows no kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from sagepatch.calibration.timing import queued

# Between two runs this is written over, so that none finds its inputs in the L2 cache.
LEAST_FLUSH_BYTES = 64 << 20


class Budget:
    """Seconds that may be spent from now on."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._start, self.seconds = now, now(), seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.seconds - self.spent

    def share(self, part: float) -> Budget:
        """A new budget, from now on: `part` (0 to 1) of what is left of this one."""
        return Budget(max(0.0, self.left) * part, self._now)

    def rest(self, part: float) -> Budget:
        """A new budget, from now on: all that is left of this one, but at least `part` (0 to 1) of
        its whole, even where that is more than is left.
        """
        return Budget(max(self.left, part * self.seconds), self._now)


class Clock(Protocol):
    """Takes the time of a call in ms, each of `runs` times."""

    def __call__(self, run: Callable[[], object], runs: int) -> list[float]: ...


class EventClock:
    """A clock by CUDA events on the current stream, as calibration takes times: the GPU is kept
    busy while runs are queued. Between runs the L2 cache is overwritten.
    """

    def __init__(self, device: torch.device) -> None:
        cached = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(
            max(LEAST_FLUSH_BYTES, 2 * cached), dtype=torch.int8, device=device
        )

    def __call__(self, run: Callable[[], object], runs: int) -> list[float]:
        device = self._flush.device
        with torch.cuda.device(device):
            taken, _ = queued(run, device, runs, between=self._flush.zero_)
        return [us / 1e3 for us in taken]


def runs_that_fit(
    ms: Sequence[float], seconds: float, rounds: int, least: int, most: int
) -> tuple[int, int]:
    """How many of the first calls fit, each run `runs` times in each round: (calls, runs).

    `ms` is about what one run of each takes. Calls are dropped from the end where even `least` runs
    of all of them last too long.

    >>> runs_that_fit([10.0, 10.0], seconds=1.0, rounds=2, least=2, most=10)
    (2, 10)
    """
    for calls in range(len(ms), 0, -1):
        one = sum(ms[:calls]) * rounds / 1e3
        if one * least <= seconds:
            return calls, most if one == 0 else max(least, min(most, int(seconds / one)))
    return 0, least
