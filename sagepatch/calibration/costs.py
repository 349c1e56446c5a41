"""What the parts of taking a sample cost in seconds, which of them the time left pays for, and in
which order candidates are worth measuring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager

from sagepatch.calibration.choose import pays
from sagepatch.spec import AttnSpec
from sagepatch.variant import Variant


class Costs:
    """Seconds that the parts of a sample took when they were last taken on such a call:
    "candidates" by their number, as comparing them costs something once; "statistics"; and the most
    that "timing" all kernels took, which most samples leave out. Shared by the layers of one
    calibration.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: dict[tuple[str, AttnSpec], float] = {}
        self._by_number: dict[AttnSpec, dict[int, float]] = {}

    @contextmanager
    def counting(self, part: str, spec: AttnSpec, of: Sized | None = None) -> Iterator[None]:
        """Remember what happens meanwhile as the cost of a part, or of as many candidates as `of`
        holds in the end. It must end with results that the host has waited for.
        """
        started = self._clock()
        yield
        took = self._clock() - started
        if of is not None:
            if len(of):
                known = self._by_number.setdefault(spec, {})
                known.pop(len(of), None)
                known[len(of)] = took
            return
        before = self._last.get((part, spec), 0.0) if part == "timing" else 0.0
        self._last[part, spec] = max(before, took)

    def _candidates(self, number: int, spec: AttnSpec) -> float:
        """Seconds of so many candidates: on the line through the last two numbers that were
        measured, or in proportion to the only one; 0 where none was.
        """
        known = list(self._by_number.get(spec, {}).items())[-2:]
        if not known:
            return 0.0
        last, took = known[-1]
        each = took / last
        if len(known) == 2:
            before, earlier = known[0]
            each = max(0.0, (took - earlier) / (last - before))
        return max(0.0, took + each * (number - last))

    def affordable(self, room: float, most: int, spec: AttnSpec) -> int:
        """How many candidates a sample may measure in `room` seconds beside its statistics, up to
        `most`; one always, and all where nobody knows what one costs.
        """
        if math.isinf(room) or spec not in self._by_number:
            return most
        left = room - self._last.get(("statistics", spec), 0.0)
        fitting = (n for n in range(most, 1, -1) if self._candidates(n, spec) <= left)
        return next(fitting, 1)

    def admits_timing(self, room: float, spec: AttnSpec) -> bool:
        """Whether `room` seconds hold another timing, which is more careful than the first."""
        return room >= 2 * self._last.get(("timing", spec), 0.0)

    def admits_statistics(self, room: float, spec: AttnSpec) -> bool:
        """Whether `room` seconds hold one candidate and the statistics of its inputs."""
        known = self._last.get(("statistics", spec), 0.0)
        return room >= known + self._candidates(1, spec)


def by_use(
    variants: Sequence[Variant], us: Mapping[str, float | None], us_exact: float | None
) -> list[Variant]:
    """Candidates in the order in which measuring them serves a plan on this GPU: the fastest of
    each tier that pays, the others that do, then those that do not, which no plan takes here. As
    they are where nothing was timed.
    """
    known = {variant.name: us.get(variant.name) for variant in variants}
    if us_exact is None or any(one is None for one in known.values()):
        return list(variants)
    times = {name: one for name, one in known.items() if one is not None}
    ranked = sorted(variants, key=lambda variant: times[variant.name])
    first: dict[str, Variant] = {}
    for variant in ranked:
        if pays(times[variant.name], us_exact):
            first.setdefault(variant.tier, variant)
    return sorted(
        ranked, key=lambda v: (not pays(times[v.name], us_exact), first.get(v.tier) is not v)
    )
