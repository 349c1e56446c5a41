"""What taking a sample costs, part by part, and in which order its parts are worth their time."""

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
    "candidate" for one of them, "statistics". Shared by the layers of one calibration.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: dict[tuple[str, AttnSpec], float] = {}

    @contextmanager
    def counting(self, part: str, spec: AttnSpec, of: Sized | None = None) -> Iterator[None]:
        """Remember what happens meanwhile as the cost of a part, or of each of the parts that `of`
        holds in the end. It must end with results that the host has waited for.
        """
        started = self._clock()
        yield
        if of is None or len(of):
            took = self._clock() - started
            self._last[part, spec] = took / (1 if of is None else len(of))

    def affordable(self, room: float, most: int, spec: AttnSpec) -> int:
        """How many candidates a sample may measure in `room` seconds beside its statistics, up to
        `most`; one always, and all where nobody knows what one costs.
        """
        each = self._last.get(("candidate", spec), 0.0)
        if math.isinf(room) or not each:
            return most
        left = room - self._last.get(("statistics", spec), 0.0)
        return max(1, min(most, math.floor(left / each)))

    def admits_statistics(self, room: float, spec: AttnSpec) -> bool:
        """Whether `room` seconds hold one candidate and the statistics of its inputs."""
        parts = ("candidate", "statistics")
        return room >= sum(self._last.get((part, spec), 0.0) for part in parts)


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
