"""Which calls of a run are measured, so that measuring takes at most as long as the run itself."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sagepatch.calibration.sections import sampled_steps, section_of
from sagepatch.schedule import Place, fraction

CPU = torch.device("cpu")
# Measuring may take as long as the run itself. Planned is a little less, since what a sample will
# take is an estimate.
SHARE = 0.85
# What the search for remedies may take where nobody knows how long the run takes.
FIRST_REMEDIES_SECONDS = 0.5
# So many calls of a layer are measured without a schedule, whatever they cost.
UNPAID = 2
# How long one search is expected to take before the first has been made.
SEARCH_SECONDS = 0.05


def _section(step: int, steps: int) -> int:
    return section_of(fraction(step, steps))


def power_of_two(number: int) -> bool:
    """Whether a count from 1 is 1, 2, 4, 8 ..."""
    return number > 0 and number & (number - 1) == 0


@dataclass(eq=False)
class _Generation:
    """One walk through a schedule, and the account of measuring on it.

    `first` and `last` are the steps seen, `since` the run's own clock at the first of them. `costs`
    is what measuring each step took without timing kernels, `decided` whether it is measured,
    `looked` how many calls of it were, `taken` how many samples they gave; `spent` all that
    measuring took, `diagnosing` the search for remedies. `own_seconds` is what the whole walk will
    take without measuring, 0 if unknown; `anchor` and `latest` the own clock at the first call
    measured and at the last one. Without a schedule `decided` is by call, `samples` counts the
    calls measured and `sampling` is what they took without timing kernels.
    """

    first: int
    since: float
    last: int = 0
    costs: dict[int, float] = field(default_factory=dict)
    decided: dict[int, bool] = field(default_factory=dict)
    looked: Counter[int] = field(default_factory=Counter)
    taken: Counter[int] = field(default_factory=Counter)
    between: frozenset[int] | None = None
    spent: float = 0.0
    diagnosing: float = 0.0
    own_seconds: float = 0.0
    anchor: float = 0.0
    latest: float = 0.0
    samples: int = 0
    sampling: float = 0.0

    def over(self, step: int) -> bool:
        """Whether a call in this step begins another walk."""
        return step <= self.first < self.last


class Pace:
    """One clock for all layers of a calibration: which steps are measured, and what that took.

    The first and the last step of each walk through a schedule are always measured; of the steps
    between those of `sections.sampled_steps` that `SHARE` of the walk's own time pays for. Where no
    call of the first one was a sample, the next of them takes its place, if that time pays for it.
    Compiling and checking kernels, which a machine does once, is left out of that account.
    Thread-safe.

    `held` are the places in the schedule of samples taken before: others are measured rather.
    `layers`, how many layers are measured, lets `room` divide the account among them; 0 does not.
    `run` names the run that goes on, `number` counts the runs. `measuring_seconds` is all that
    measuring took so far, `preparing_seconds` what compiling and checking did.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        held: Iterable[float] = (),
        layers: int = 0,
    ) -> None:
        self.run, self.number = "", 0
        self.layers = layers
        # Samples of each section of the schedule, of all runs.
        self._held = Counter(section_of(at) for at in held)
        self.run_seconds = 0.0
        self.measuring_seconds = 0.0
        self.preparing_seconds = 0.0
        self._clock = clock
        self._lock = threading.RLock()
        # Of the run that goes on: what measuring took, when it began, and its schedules by length.
        # Threads that measure at once share that time: it is counted from the first's beginning,
        # `_since`, to the end of the last of the `_measuring`.
        self._spent = 0.0
        self._measuring, self._since = 0, 0.0
        self._began = 0.0
        self._runs = False
        self._walks: dict[int, _Generation] = {}
        # Of calls without a schedule.
        self._unplaced = _Generation(0, 0.0)
        self._gpus: set[torch.device] = set()
        # The longest search for remedies yet.
        self._search = 0.0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Count what happens meanwhile as one run, usually one generation."""
        self.run, self.number = name, self.number + 1
        self._spent, self._began, self._runs = 0.0, self._clock(), True
        self._since = self._began
        self._walks, self._unplaced = {}, _Generation(0, 0.0)
        try:
            yield
        finally:
            self.run, self._runs = "", False
            for device in self._gpus:
                # The run ends when the GPU has done its work, not when the host has queued it.
                torch.cuda.synchronize(device)
            with self._lock:
                self.run_seconds += self._own_clock() - self._began

    def due(self, place: Place | None, count: int, device: torch.device = CPU) -> bool:
        """Whether a layer's call on `device` is to be measured: its `count`th (from 1) in this
        step, or at all where there is no schedule. Where that depends on how long the run takes, a
        GPU's work is waited for: the host may be steps ahead.
        """
        if not power_of_two(count):
            return False
        if place is None:
            return self._due_unplaced(count, device)
        with self._lock:
            walk = self._walks.get(place.steps)
            if walk is None or walk.over(place.step):
                walk = _Generation(place.step, self._own_clock())
                self._walks[place.steps] = walk
            walk.last = max(walk.last, place.step)
            known = walk.decided.get(place.step)
            if known is None:
                if place.step > walk.first:
                    if device.type == "cuda" and place.step in sampled_steps(place.steps):
                        torch.cuda.synchronize(device)
                    # This is the first call of a step, so only whole steps have run until now.
                    own = self._own_clock() - walk.since
                    walk.own_seconds = own / (place.step - walk.first) * place.steps
                known = walk.decided[place.step] = _admits(walk, place, self._held)
            return known

    def _due_unplaced(self, count: int, device: torch.device) -> bool:
        """Whether calls without a schedule pay for their `count`th. The first two of a layer are
        measured always, as nothing is chosen on one; later ones where the run's own time until now
        holds as much again as they took on the whole. Known only where `layers` share the account.
        """
        with self._lock:
            walk = self._unplaced
            if count <= UNPAID or not self.layers or not self._runs:
                return True
            known = walk.decided.get(count)
            if known is None:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                # Of all layers, the first that comes to this call decides.
                own = self._own_clock() - self._began
                each = walk.sampling / max(1, walk.samples)
                after = walk.spent + each * self.layers
                known = walk.decided[count] = after <= SHARE * own
            return known

    @contextmanager
    def measuring(self, place: Place | None, device: torch.device) -> Iterator[Timing]:
        """Count what happens meanwhile as measuring, not as the run; what the GPU still has to do
        of the run is waited for first. No sample is taken where it raises or the timing is told so.
        """
        if device.type == "cuda":
            self._gpus.add(device)
            torch.cuda.synchronize(device)
        walk = self._walk(place)
        timing, before = Timing(self._clock), walk.diagnosing
        with self._lock:
            if not self._measuring:
                self._since = timing.started
            self._measuring += 1
            walk.latest = self._own_clock()
            if not walk.looked:
                walk.anchor = walk.latest
        try:
            yield timing
        except BaseException:
            timing.spoilt = True
            raise
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ended = self._clock()
            took = ended - timing.started
            with self._lock:
                self._measuring -= 1
                if not self._measuring:
                    self._spent += ended - self._since
                self.preparing_seconds += timing.prepared
                took -= timing.prepared
                walk.spent += took
                self.measuring_seconds += took
                if place is None:
                    walk.samples += 1
                    walk.sampling += took - timing.seconds
                else:
                    walk.looked[place.step] += 1
                    if not timing.spoilt:
                        # A step counts once for its section, however many layers it has.
                        self._held[_section(place.step, place.steps)] += not walk.taken[place.step]
                        walk.taken[place.step] += 1
                    cost = took - timing.seconds - (walk.diagnosing - before)
                    walk.costs[place.step] = walk.costs.get(place.step, 0.0) + cost

    def room(self, place: Place | None, timing: Timing) -> float:
        """Seconds that are left for the sample that is being taken, `timing`, so that those that
        are still to come have as much within the walk's own time; infinite where nobody knows.
        """
        with self._lock:
            if place is None or not self.layers or not self._runs:
                return math.inf
            walk = self._walk(place)
            own = self._own(walk, place)
            if not own:
                return math.inf
            ahead = max(1, self.layers - walk.taken[place.step])
            if place.step < place.steps - 1:
                ahead += self.layers
            return (SHARE * own - walk.spent - timing.elapsed) / ahead

    def spares(self, place: Place | None) -> bool:
        """Whether there is time to look for remedies too: what the walk's own time leaves beside
        the measured steps, a moment where that is not known yet.
        """
        with self._lock:
            walk = self._walk(place)
            # The layers share the time that the run pays for. Until that time is known nothing is
            # spent on remedies.
            shared = self._runs and self.layers > 0
            search = self._search or (SEARCH_SECONDS if shared else 0.0)
            left = FIRST_REMEDIES_SECONDS + self._search
            own = self._own(walk, place) if place is not None and self._runs else 0.0
            if place is not None and (own or shared):
                # What the steps still to be measured will take is set aside.
                ahead = sum(step >= place.step for step in sampled_steps(place.steps))
                costs = ahead * max(walk.costs.values(), default=0.0)
                spare = SHARE * own - (walk.spent - walk.diagnosing) - costs
                left = spare if shared else max(left, spare)
            return walk.diagnosing + search <= left

    @contextmanager
    def diagnosing(self, place: Place | None) -> Iterator[None]:
        """Count what happens meanwhile as the search for remedies."""
        started = self._clock()
        try:
            yield
        finally:
            with self._lock:
                took = self._clock() - started
                self._walk(place).diagnosing += took
                self._search = max(self._search, took)

    def _own(self, walk: _Generation, place: Place) -> float:
        """What a whole walk will take without measuring, 0 where nobody knows."""
        looked = walk.looked[place.step]
        if walk.own_seconds or not looked:
            return walk.own_seconds
        # In the first step: as long as from layer to layer until now.
        return (walk.latest - walk.anchor) / looked * self.layers * place.steps

    def _own_clock(self) -> float:
        """Seconds of the run without its measuring."""
        return (self._since if self._measuring else self._clock()) - self._spent

    def _walk(self, place: Place | None) -> _Generation:
        if place is None:
            return self._unplaced
        walk = self._walks.get(place.steps)
        if walk is None:
            # A self-calibration measures without asking `due`, which would have begun the walk.
            walk = self._walks[place.steps] = _Generation(place.step, self._own_clock())
        return walk


def _admits(walk: _Generation, place: Place, held: Mapping[int, int]) -> bool:
    """Whether a walk's own time pays for measuring this step, the last one being due still; `held`
    are the samples of each section of the schedule.
    """
    wanted = sampled_steps(place.steps)
    if place.step not in wanted:
        return False
    if not walk.costs or place.step == place.steps - 1:
        return True
    if not walk.own_seconds:
        return False
    cost = max(min(walk.costs.values()), 1e-9)
    # Besides the last one.
    affordable = int((SHARE * walk.own_seconds - walk.spent) / cost) - 1
    if not walk.taken:
        # It takes the place of the first one, which gave no sample.
        return affordable > 0
    if walk.between is None:
        left = [min(walk.taken), *(step for step in wanted if step >= place.step)]
        samples = {step: held.get(_section(step, place.steps), 0) for step in left}
        walk.between = spread(left, affordable, samples)
    return affordable > 0 and place.step in walk.between


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
    done once on a machine. `spoilt`: it turned out to be none, as its outputs were not finite.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.prepared = 0.0
        self.spoilt = False
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
