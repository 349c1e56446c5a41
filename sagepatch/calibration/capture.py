"""Self-calibration of one layer: looks at a few live calls, returns their exact output, keeps only
numbers.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.backends.selfcheck import failure
from sagepatch.calibration.costs import Costs, by_use
from sagepatch.calibration.diagnose import diagnosed
from sagepatch.calibration.keeping import kept
from sagepatch.calibration.measure import Rows, Stopwatch, errors_of, measured_rows
from sagepatch.calibration.pace import Pace, Timing, power_of_two
from sagepatch.calibration.readying import make_ready
from sagepatch.calibration.sample import Remedy, Sample
from sagepatch.calibration.statistics import statistics
from sagepatch.calibration.table import LayerTable
from sagepatch.dispatch import Request, candidates, wide_stays_exact
from sagepatch.errors import KernelUnavailable, MachineError
from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_exact
from sagepatch.schedule import Place
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# The calls of a layer that are measured before it locks; the calls between them run exact.
SAMPLED_CALLS = (1, 2, 4, 8)
# What calibration tries unless told otherwise, best first: 8-bit recipes of the fast tier and those
# of the safe one. 4-bit recipes cost accuracy without being faster on most GPUs.
CANDIDATE_RECIPES = (
    *("sage2_8b_k128", "sage2_8", "sage2pp_8_d4", "sage2pp_8", "sage1_vb"),
    *("sage1_b", "sage1_b_f32"),
)
# Of these at most so many a tier, the first that serve the call.
MOST_OF_TIER = {"fast": 4, "safe": 2}
# Emulations are slow: one or two of each tier, and in a schedule of fewer than so many steps, whose
# own time pays for no more, one.
EMULATED_RECIPES = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_b_f32")
EMULATED_FEW, FEW_STEPS = ("sage2pp_8", "sage1_b"), 6


@dataclass(eq=False)
class LayerCalibration:
    """The measurements of one layer; its `observe` is the observer of a `PatchedLayer`.

    With `done` the 1st, 2nd, 4th and 8th call are measured and `done(layer)` is called after the
    last of them; without it the pace says what is measured, without an end.
    """

    stopwatch: Stopwatch
    done: Callable[[PatchedLayer], None] | None = None
    pace: Pace = field(default_factory=Pace)
    rows: list[Sample] = field(default_factory=list)
    remedies: tuple[Remedy, ...] = ()
    calls: int = 0
    costs: Costs = field(default_factory=Costs, repr=False)
    # What earlier sittings had no time for at this layer.
    lost: tuple[str, ...] = ()
    # The run and the place in it that calls are counted in, and how many there were; the run that
    # `calls` is counted in, and the calls before it.
    _step: tuple[int, Place | None, int] = (0, None, 0)
    _run: tuple[int, int] = (0, 0)
    # Looking through the catalogue costs more than a launch: once for a kind of call.
    _tried: dict[AttnSpec, list[Variant]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run one call exactly; measure the candidates on it if it is one of the sampled calls."""
        refuse_capture(layer, call, "still calibrates")
        out, lse = run_exact(call)
        # A layer runs a single query exactly whatever its plan says: such a call shows nothing.
        if call.q.shape[2] <= 1:
            return out, lse
        # One thread measures at a time; the others get their exact output and go on.
        if self._lock.acquire(blocking=False):
            try:
                if self.pace.number != self._run[0]:
                    self._run = self.pace.number, self.calls
                self.calls += 1
                place = layer.schedule.place()
                if self._due(place, call.q.device):
                    self._sample(layer, call, out, place)
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
        return LayerTable(layer.name, layer.kind, tuple(self.rows), self.remedies)

    def _due(self, place: Place | None, device: torch.device) -> bool:
        if self.done is not None:
            return power_of_two(self.calls)
        # Counts anew in each step, and in each run where there is no schedule.
        step = self.pace.number, place
        count = self._step[2] + 1 if self._step[:2] == step else 1
        self._step = (*step, count)
        return self.pace.due(place, count, device)

    def _sample(self, layer: PatchedLayer, call: Call, exact: Tensor, place: Place | None) -> None:
        with self.pace.measuring(place, call.q.device) as timing:
            row = self._measured(layer, call, exact, place, timing)
        self.rows[:] = kept([*self.rows, replace(row, run=self.pace.run)])

    def _measured(
        self,
        layer: PatchedLayer,
        call: Call,
        exact: Tensor,
        place: Place | None,
        timing: Timing,
    ) -> Sample:
        spec = call.spec()
        with timing.preparing():
            tried = self._tried.get(spec)
            if tried is None:
                tried = self._tried[spec] = candidate_variants(spec, layer, call=call)
        # Where emulations may win, times decide nothing.
        timed = bool(tried) and not layer.policy.emulate
        times: dict[str, float | None] = {}
        with timing.running():
            us_exact = self.stopwatch.us(SDPA, call, spec) if timed else None
            for variant in tried if timed else ():
                with only_this_one(layer, variant, spec):
                    times[variant.name] = self.stopwatch.us(variant, call, spec)
        serving = [v for v in tried if v.name in times] if timed else tried
        order = by_use(serving, times, us_exact)
        # One that an earlier sample lacks for time cannot be chosen any more.
        lost = {*self.lost, *(name for row in self.rows for name in row.skipped)}
        order = [variant for variant in order if variant.name not in lost]
        room = self.pace.room(place, timing) if timed else math.inf
        many = self.costs.affordable(room, len(order), spec)
        if place is not None and place.steps < FEW_STEPS and self.done is None and not timed:
            order = sorted(order, key=lambda variant: variant.recipe.name not in EMULATED_FEW)
            many = sum(variant.recipe.name in EMULATED_FEW for variant in order) or many
        taken: dict[str, Rows] = {}
        with self.costs.counting("candidate", spec, of=taken):
            for variant in order[:many]:
                with only_this_one(layer, variant, spec):
                    taken[variant.name] = measured_rows(variant, call, exact)
            found = errors_of(taken)
        errors = {
            variant.name: replace(found[variant.name], us=times.get(variant.name))
            for variant in tried
            if variant.name in found
        }
        looked = None
        if self.costs.admits_statistics(room, spec):
            with self.costs.counting("statistics", spec):
                looked = statistics(call)
        made = Sample(
            # A run with a name may be taken up again: its calls have the same numbers then.
            call=self.calls - self._run[1] if self.pace.run else self.calls,
            step=None if place is None else place.step,
            steps=None if place is None else place.steps,
            shape=str(spec),
            dtype=spec.dtype,
            errors=errors,
            statistics=looked,
            us_exact=us_exact,
            skipped=tuple(v.name for v in serving if v.name in lost or v in order[many:]),
        )
        if self.pace.spares(place):
            with self.pace.diagnosing(place):
                self.remedies = diagnosed(call, exact, made, self.remedies)
        return made


@contextmanager
def only_this_one(layer: PatchedLayer, variant: Variant, spec: AttnSpec) -> Iterator[None]:
    """Let a kernel that cannot serve this call while it is looked at cost only itself; other
    exceptions go on, with its name.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        # The call itself fitted: only the measuring did not, so the run goes on.
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


def candidate_variants(
    spec: AttnSpec,
    layer: PatchedLayer,
    recipes: Collection[str] | None = None,
    call: Call | None = None,
) -> list[Variant]:
    """The kernels that calibration tries on a call of this layer, those that nothing speaks
    against and that know their answer; of `recipes` only, where they are given. Calls in FP32 have
    none unless recipes are asked for; the layer's record says so. With `call`, one of that kind,
    they are made ready side by side.
    """
    if spec.q_len <= 1:
        return []
    wide = wide_stays_exact(spec, layer.policy.emulate)
    if wide is not None and recipes is None:
        layer.record.note(wide)
        return []
    request = Request("auto", emulate=layer.policy.emulate)
    serving = [
        decision.variant
        for decision in candidates(spec, request, layer.unusable, CATALOGUE)
        if not decision.reasons and decision.variant is not SDPA
    ]
    if recipes is not None:
        asked = [variant for variant in serving if variant.recipe.name in recipes]
        if call is not None:
            make_ready(asked, call)
        return [variant for variant in asked if _proven(variant, layer, spec)]
    if call is not None:
        make_ready(_few(serving, lambda variant: True), call)
    return _few(serving, lambda variant: _proven(variant, layer, spec))


def _few(serving: Sequence[Variant], proven: Callable[[Variant], bool]) -> list[Variant]:
    """The first `MOST_OF_TIER` of each tier that calibration tries and that are `proven`."""
    taken: Counter[tuple[bool, str]] = Counter()
    chosen = []
    for variant in sorted(serving, key=_preference):
        emulated = variant.toolchain == "emulated"
        listed = EMULATED_RECIPES if emulated else CANDIDATE_RECIPES
        place = (emulated, variant.tier)
        wanted = variant.recipe.name in listed and taken[place] < MOST_OF_TIER[variant.tier]
        if wanted and proven(variant):
            taken[place] += 1
            chosen.append(variant)
    return chosen


def _proven(variant: Variant, layer: PatchedLayer, spec: AttnSpec) -> bool:
    """Whether a kernel passes its known-answer check on the GPU of a call, made at its first use;
    else the layer's record says why it is not tried.
    """
    why = failure(variant, spec.gpu)
    if why is not None:
        layer.record.note(f"{variant.name} is not tried: {why}")
    return why is None


def _preference(variant: Variant) -> int:
    listed = EMULATED_RECIPES if variant.toolchain == "emulated" else CANDIDATE_RECIPES
    name = variant.recipe.name
    return listed.index(name) if name in listed else len(listed)
