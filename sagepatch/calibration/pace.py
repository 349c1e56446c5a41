"""Which calls of a run are measured, so that measuring takes at most as long as the run itself."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from sagepatch.calibration.sections import sampled_steps, section_of
from sagepatch.schedule import Place, fraction

# Spent on remedies before it is known how long the run takes.
FIRST_REMEDIES_SECONDS = 0.5


def _section(step: int, steps: int) -> int:
    return section_of(fraction(step, steps))


def power_of_two(number: int) -> bool:
    """Whether a count from 1 is 1, 2, 4, 8 ..."""
    return number > 0 and number & (number - 1) == 0


class Pace:
    """One clock for all layers of a calibration: which steps are measured, and what that took.

    The first and the last step of a run are always measured; of the steps between those of
    `sections.sampled_steps` that the run's own time pays for. Compiling and checking kernels, which
    a machine does once, is left out of that account. Thread-safe.

    `held` are the places in the schedule of samples taken before: others are measured rather.
    `layers`, how many layers are measured, lets `room` divide the account among them; 0 does not.
    `run` names the run that goes on. `measuring_seconds` is all that measuring took so far,
    `preparing_seconds` what compiling and checking did.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        held: Iterable[float] = (),
        layers: int = 0,
    ) -> None:
        self.run = ""
        self.layers = layers
        # Samples of each section of the schedule, of all runs.
        self._held = Counter(section_of(at) for at in held)
        self.run_seconds = 0.0
        self.measuring_seconds = 0.0
        self.preparing_seconds = 0.0
        self._clock = clock
        self._lock = threading.RLock()
        # Of the run that goes on: what measuring took, with what was made ready and without, and
        # with what it began and where.
        self._spent = 0.0
        self._account = 0.0
        self._began = 0.0
        self._first: tuple[int, float] | None = None
        # What measuring a step took, its timing of kernels aside, and whether a step is measured.
        self._costs: dict[int, float] = {}
        self._decided: dict[int, bool] = {}
        self._between: frozenset[int] | None = None
        # What remedies took, and what the whole run will take without measuring, 0 if unknown.
        self._diagnosing = 0.0
        self._own_seconds = 0.0
        # The longest search for remedies yet.
        self._search = 0.0
        # How many samples each step gave, and the run's own clock at the first of them and now.
        self._taken: Counter[int] = Counter()
        self._anchor = self._own_clock = 0.0
        self._runs = False

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Count what happens meanwhile as one run, a generation."""
        self.run = name
        self._spent, self._account, self._began, self._first = 0.0, 0.0, self._clock(), None
        self._costs, self._decided, self._between = {}, {}, None
        self._taken, self._runs = Counter(), True
        self._diagnosing = self._own_seconds = 0.0
        try:
            yield
        finally:
            self.run, self._runs = "", False
            self.run_seconds += self._clock() - self._began - self._spent

    def due(self, place: Place | None, count: int) -> bool:
        """Whether a layer's call is to be measured: its `count`th (from 1) in this step, or at all
        where there is no schedule.
        """
        if not power_of_two(count):
            return False
        if place is None:
            return True
        with self._lock:
            if self._first is None:
                self._first = place.step, self._clock()
            known = self._decided.get(place.step)
            if known is None:
                first, since = self._first
                if place.step > first:
                    # Looked at where a step begins: what ran is whole steps.
                    own = self._clock() - since - self._spent
                    self._own_seconds = own / (place.step - first) * place.steps
                known = self._decided[place.step] = self._admits(place)
                self._held[_section(place.step, place.steps)] += known
            return known

    @contextmanager
    def measuring(self, place: Place | None, device: torch.device) -> Iterator[Timing]:
        """Count what happens meanwhile as measuring, not as the run; what the GPU still has to do
        of the run is waited for first.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timing, before = Timing(self._clock), self._diagnosing
        started = timing.started
        with self._lock:
            self._own_clock = started - self._spent
            if not self._taken:
                self._anchor = self._own_clock
        try:
            yield timing
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took = self._clock() - started
            with self._lock:
                self._spent += took
                self.preparing_seconds += timing.prepared
                took -= timing.prepared
                self._account += took
                self.measuring_seconds += took
                if place is not None:
                    self._taken[place.step] += 1
                    cost = took - timing.seconds - (self._diagnosing - before)
                    self._costs[place.step] = self._costs.get(place.step, 0.0) + cost

    def room(self, place: Place | None, timing: Timing) -> float:
        """Seconds that are left for the sample that is being taken, `timing`, so that those that
        are still to come have as much within the run's own time; infinite where nobody knows.
        """
        with self._lock:
            if place is None or not self.layers or not self._runs:
                return math.inf
            taken = self._taken[place.step]
            own = self._own_seconds
            if not own:
                if not taken:
                    return math.inf
                # In the first step: as long as from layer to layer until now.
                each = (self._own_clock - self._anchor) / taken
                own = each * self.layers * place.steps
            ahead = max(1, self.layers - taken)
            if place.step < place.steps - 1:
                ahead += self.layers
            return (own - self._account - timing.elapsed) / ahead

    def spares(self, place: Place | None) -> bool:
        """Whether there is time to look for remedies too: what the run's own time leaves beside the
        measured steps, a moment where that is not known yet.
        """
        with self._lock:
            left = FIRST_REMEDIES_SECONDS + self._search
            if place is not None and self._own_seconds:
                # Steps still to be measured come first.
                ahead = sum(step >= place.step for step in sampled_steps(place.steps))
                costs = ahead * max(self._costs.values(), default=0.0)
                spent = self._account - self._diagnosing
                left = max(left, self._own_seconds - spent - costs)
            return self._diagnosing + self._search <= left

    @contextmanager
    def diagnosing(self) -> Iterator[None]:
        """Count what happens meanwhile as the search for remedies."""
        started = self._clock()
        try:
            yield
        finally:
            with self._lock:
                took = self._clock() - started
                self._diagnosing += took
                self._search = max(self._search, took)

    def _admits(self, place: Place) -> bool:
        """Whether the run's own time pays for measuring this step, the last one being due still."""
        wanted = sampled_steps(place.steps)
        if place.step not in wanted:
            return False
        if not self._costs or place.step == place.steps - 1:
            return True
        assert self._first is not None
        first = self._first[0]
        if not self._own_seconds:
            return False
        cost = max(min(self._costs.values()), 1e-9)
        # Besides the last one.
        unspent = self._own_seconds - self._account
        affordable = int(unspent / cost) - 1
        if self._between is None:
            left = [first, *(step for step in wanted if step >= place.step)]
            held = {step: self._held[_section(step, place.steps)] for step in left}
            self._between = spread(left, affordable, held)
        return affordable > 0 and place.step in self._between


def spread(
    wanted: Sequence[int], count: int, held: Mapping[int, int] | None = None
) -> frozenset[int]:
    """At most `count` steps between the first and the last of some: those that have the fewest
    samples already (`held`, by step), and of these the one as far as can be from all before it.

    >>> sorted(spread([0, 2, 5, 10, 17, 22, 25, 27], 2))
    [10, 17]
    """
    samples = held or {}
    chosen: set[int] = set()
    ends = {wanted[0], wanted[-1]}

    def merit(step: int) -> tuple[int, int]:
        return -samples.get(step, 0), min(abs(step - one) for one in ends | chosen)

    for _ in range(min(count, len(wanted) - len(ends))):
        chosen.add(max((step for step in wanted if step not in ends | chosen), key=merit))
    return frozenset(chosen)


class Timing:
    """One sample being taken: since when, and how much of it went into timing kernels, done once
    for a kind of call and not in every step, and into making them ready (compiled and checked),
    done once on a machine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.prepared = 0.0
        self.started = clock()
        self._clock = clock

    @property
    def elapsed(self) -> float:
        """Seconds since the sample was begun, less those of making ready."""
        return self._clock() - self.started - self.prepared

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens meanwhile as timing."""
        started = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - started

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count what happens meanwhile as making kernels ready."""
        started = self._clock()
        try:
            yield
        finally:
            self.prepared += self._clock() - started
