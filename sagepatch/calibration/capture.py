"""Self-calibration of one layer: looks at a few live calls, returns their exact output, keeps only
numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.candidates import (
    EMULATED_FEW,
    FEW_STEPS,
    candidate_variants,
    refused_by,
)
from sagepatch.calibration.choose import SPOILT
from sagepatch.calibration.costs import Costs, by_use
from sagepatch.calibration.diagnose import diagnosed
from sagepatch.calibration.keeping import kept
from sagepatch.calibration.measure import Rows, Stopwatch, all_finite, errors_of, measured_rows
from sagepatch.calibration.pace import Pace, Timing, power_of_two
from sagepatch.calibration.sample import Remedy, Sample
from sagepatch.calibration.statistics import statistics
from sagepatch.calibration.table import LayerTable
from sagepatch.errors import KernelUnavailable, MachineError
from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_exact
from sagepatch.schedule import Place
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# The calls of a layer that are measured before it locks; the calls between them run exact.
SAMPLED_CALLS = (1, 2, 4, 8)
# A call whose exact output is not finite is no sample: the next call takes its place. A layer that
# has had this many of those is settled on the samples that it has.
MOST_SPOILT = 8
DROPPED = "a sample was dropped, as comparing kernels did not fit in memory"


@dataclass(eq=False)
class LayerCalibration:
    """The measurements of one layer; its `observe` is the observer of a `PatchedLayer`.

    With `done` the 1st, 2nd, 4th and 8th call are measured and `done(layer)` is called after the
    last of them; without it the pace says what is measured, without an end. `calls` leaves out what
    is no sample; `spoilt` counts the calls measured whose exact output was not finite.
    """

    stopwatch: Stopwatch
    done: Callable[[PatchedLayer], None] | None = None
    pace: Pace = field(default_factory=Pace)
    rows: list[Sample] = field(default_factory=list)
    remedies: tuple[Remedy, ...] = ()
    calls: int = 0
    spoilt: int = 0
    costs: Costs = field(default_factory=Costs, repr=False)
    # By candidate, the runs that measured it: the number of a run in the pace, and its name.
    runs: dict[str, dict[int, str]] = field(default_factory=dict, repr=False)
    # (number of the run, place in the schedule, calls so far in that place).
    _step: tuple[int, Place | None, int] = (0, None, 0)
    # (number of the run, `calls` when it began).
    _run: tuple[int, int] = (0, 0)
    # Looking through the catalogue costs more than a launch: once for a kind of call.
    _tried: dict[AttnSpec, list[Variant]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run one call exactly; measure the candidates on it if it is one of the sampled calls."""
        refuse_capture(layer, call, "still calibrates")
        out, lse = run_exact(call)
        if not shows_errors(call):
            return out, lse
        # One thread measures at a time; the others get their exact output and go on.
        if self._lock.acquire(blocking=False):
            try:
                if self.pace.number != self._run[0]:
                    self._run = self.pace.number, self.calls
                self.calls += 1
                place = layer.schedule.place()
                if self._due(place, call.q.device) and not self._sampled(layer, call, out, place):
                    self._give_up_place(layer)
                finished = self.calls == SAMPLED_CALLS[-1]
            finally:
                self._lock.release()
            if finished and self.done is not None:
                self.done(layer)
        return out, lse

    @property
    def samples(self) -> int:
        """How many samples are held."""
        return len(self.rows)

    def table(self, layer: PatchedLayer) -> LayerTable:
        """What was measured so far, frozen."""
        # Another thread may be taking a sample: count on copies.
        runs = {name: tuple(those.copy().values()) for name, those in self.runs.copy().items()}
        return LayerTable(
            layer.name, layer.kind, tuple(self.rows), self.remedies, runs, self.spoilt
        )

    def _due(self, place: Place | None, device: torch.device) -> bool:
        if self.done is not None:
            return power_of_two(self.calls)
        # Counts anew in each step, and in each run where there is no schedule.
        step = self.pace.number, place
        count = self._step[2] + 1 if self._step[:2] == step else 1
        self._step = (*step, count)
        return self.pace.due(place, count, device)

    def _give_up_place(self, layer: PatchedLayer) -> None:
        """Leave the place of a call that was no sample to the next one, within `MOST_SPOILT`."""
        layer.record.note(SPOILT)
        self.spoilt += 1
        if self.spoilt < MOST_SPOILT:
            self.calls -= 1
            number, place, count = self._step
            self._step = number, place, count - 1
        elif self.done is not None:
            self.calls = SAMPLED_CALLS[-1]

    def _sampled(self, layer: PatchedLayer, call: Call, exact: Tensor, place: Place | None) -> bool:
        """Take a sample; False where it teaches nothing, as the exact output is not finite. One
        that does not fit in memory is dropped: trying again at once would not either.
        """
        with self.pace.measuring(place, call.q.device) as timing:
            try:
                row = self._measured(layer, call, exact, place, timing)
            except torch.OutOfMemoryError:
                # The user's call fitted, and its output is there: only the sample is lost.
                layer.record.note(f"{DROPPED}: {call.spec()}")
                timing.spoilt = True
                return True
            timing.spoilt = row is None
        if row is None:
            return False
        for name in (SDPA.name, *row.errors):
            self.runs.setdefault(name, {})[self.pace.number] = self.pace.run
        self.rows[:] = kept([*self.rows, replace(row, run=self.pace.run)])
        return True

    def _measured(
        self,
        layer: PatchedLayer,
        call: Call,
        exact: Tensor,
        place: Place | None,
        timing: Timing,
    ) -> Sample | None:
        spec = call.spec()
        with timing.preparing():
            tried = self._tried.get(spec)
            if tried is None:
                tried = self._tried[spec] = candidate_variants(spec, layer, call=call)
                if spec.device == "cuda":
                    _load_comparing(call)
        # With `emulate` nothing is timed: an emulation's time says nothing about a kernel's.
        timed = bool(tried) and not layer.policy.emulate
        times: dict[str, float | None] = {}
        us_exact = None
        if timed:
            again = self.costs.admits_timing(self.pace.room(place, timing), spec)
            fits = False
            with timing.running(), self.costs.counting("timing", spec):
                with only_this_one(layer, SDPA, spec):
                    us_exact = self.stopwatch.us(SDPA, call, spec, again, layer=layer.name)
                    fits = True
                # What cannot be compared with exact attention's time is not chosen.
                for variant in tried if fits else ():
                    with only_this_one(layer, variant, spec):
                        us = self.stopwatch.us(variant, call, spec, again, layer=layer.name)
                        times[variant.name] = us
        serving = [v for v in tried if v.name in times] if timed else tried
        order = by_use(serving, times, us_exact)
        room = self.pace.room(place, timing) if timed else math.inf
        many = self.costs.affordable(room, len(order), spec)
        if place is not None and place.steps < FEW_STEPS and self.done is None and not timed:
            order = sorted(order, key=lambda variant: variant.recipe.name not in EMULATED_FEW)
            many = sum(variant.recipe.name in EMULATED_FEW for variant in order) or many
        finite = all_finite(exact)
        taken: dict[str, Rows] = {}
        with self.costs.counting("candidates", spec, of=taken):
            for variant in order[:many]:
                with only_this_one(layer, variant, spec):
                    taken[variant.name] = measured_rows(variant, call, exact)
            found = errors_of(taken)
        # `finite` was queued before the errors, which have been read: this waits for nothing.
        if not finite.item():
            return None
        errors = {
            variant.name: replace(
                found[variant.name],
                us=times.get(variant.name),
                host_us=self.stopwatch.host_us(variant, spec),
            )
            for variant in tried
            if variant.name in found
        }
        looked = None
        if self.costs.admits_statistics(room, spec):
            try:
                with self.costs.counting("statistics", spec):
                    looked = statistics(call)
            except torch.OutOfMemoryError:
                layer.record.note(f"statistics of its inputs did not fit in memory: {spec}")
        made = Sample(
            # The calls of a named run are numbered from its start, so that a calibration that is
            # taken up again gives them the same numbers.
            call=self.calls - self._run[1] if self.pace.run else self.calls,
            step=None if place is None else place.step,
            steps=None if place is None else place.steps,
            shape=str(spec),
            dtype=spec.dtype,
            errors=errors,
            statistics=looked,
            us_exact=us_exact,
            skipped=tuple(variant.name for variant in order[many:]),
            refused=(
                *(v.name for v in tried if v not in order[many:] and v.name not in found),
                *refused_by(spec, layer, tried),
            ),
            host_us_exact=self.stopwatch.host_us(SDPA, spec),
        )
        if self.pace.spares(place):
            try:
                with self.pace.diagnosing(place):
                    self.remedies = diagnosed(call, exact, made, self.remedies)
            except torch.OutOfMemoryError:
                layer.record.note(f"looking for remedies did not fit in memory: {spec}")
        return made


def shows_errors(call: Call) -> bool:
    """Whether a call can be a sample: a layer runs a single query exactly whatever its plan says,
    and one of no batch member, query, key or head has no output that a kernel could get wrong.
    """
    return call.q.shape[2] > 1 and all(x.numel() for x in (call.q, call.k, call.v))


def _load_comparing(call: Call) -> None:
    """Let torch load the kernels that compare and describe tensors, which it does at their first
    use in a process.
    """
    few = call.q[:, :1, :2, : min(call.k.shape[3], call.v.shape[3])]
    errors_of({SDPA.name: Rows(few, few)})
    statistics(Call(few, few, few, call.scale))


@contextmanager
def only_this_one(layer: PatchedLayer, variant: Variant, spec: AttnSpec) -> Iterator[None]:
    """Let a kernel that cannot serve this call while it is looked at cost only itself; other
    exceptions go on, with its name.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        # The user's call fitted in memory and only the measuring did not: the run goes on.
        layer.record.note(f"{variant.name} did not fit in memory while measured: {spec}")
    except KernelUnavailable as error:
        # Found before a launch: the other candidates are measured.
        layer.record.note(str(error))
    except Exception as error:
        error.add_note(f"raised by {variant.name}, measured in layer {layer.name}: {spec}")
        raise


def refuse_capture(layer: PatchedLayer, call: Call, state: str) -> None:
    """Raise where a layer that is not settled is being captured in a CUDA graph."""
    if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MachineError(
            f"layer {layer.name} {state} and cannot be captured in a CUDA graph: "
            "run a few calls and patch.lock() first"
        )
