"""A plan entry made earlier or elsewhere, before a layer settles on it: a kept one is checked
against the layer's first call, one of another GPU is timed again on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, SDPA
from sagepatch.calibration.candidates import candidate_variants
from sagepatch.calibration.capture import only_this_one, refuse_capture, shows_errors
from sagepatch.calibration.choose import pays
from sagepatch.calibration.measure import Stopwatch
from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_exact
from sagepatch.plan import PlanEntry, PlanRange
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# A kept entry serves lengths within this factor of those measured; prompts vary.
KEPT_FACTOR = 2.0
# An entry's errors were measured with its own recipe: another one's are not in the plan.
_NO_ERRORS = ("cosine", "cosine_mean", "rel_l1", "rmse", "norm_ratio", "worst_head", "worst_call")
# What plans say of a layer, and of a layer in one part of the schedule.
_Part = TypeVar("_Part", PlanEntry, PlanRange)


@dataclass(frozen=True, slots=True)
class FirstLook:
    """Takes an entry if the layer's first call is like those it was measured on; else calls
    `measure_anew`, which gives the layer another observer.
    """

    entry: PlanEntry
    reason: str
    settle: Callable[[PatchedLayer, PlanEntry, str], None]
    measure_anew: Callable[[PatchedLayer], None]

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None] | None:
        """Settle the layer, or start to measure it, on its first call of several queries."""
        if not shows_errors(call):
            return run_exact(call)
        spec = call.spec()
        if self.entry.measured_like(spec, KEPT_FACTOR):
            self.settle(layer, self.entry, self.reason)
            return None
        self.measure_anew(layer)
        observer = layer.observer
        return None if observer is None else observer(layer, call)


@dataclass(frozen=True, slots=True)
class TimeAgain:
    """Times an entry's accurate kernels on this GPU, at the layer's first call there, and takes the
    fastest, exact attention included; the entry's accuracy stands.
    """

    entry: PlanEntry
    stopwatch: Stopwatch
    settle: Callable[[PatchedLayer, PlanEntry], None]

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None] | None:
        """Settle the layer on its first call of several queries where times can be taken."""
        refuse_capture(layer, call, "is still to be timed on this GPU")
        if not shows_errors(call):
            return run_exact(call)
        spec = call.spec()
        us_exact = None
        with only_this_one(layer, SDPA, spec):
            us_exact = self.stopwatch.us(SDPA, call, spec, layer=layer.name)
        if us_exact is None:
            return run_exact(call)
        self.settle(layer, self._timed(layer, call, spec, us_exact))
        return None

    def _timed(self, layer: PatchedLayer, call: Call, spec: AttnSpec, us_exact: float) -> PlanEntry:
        entry = self.entry
        recipes = _recipes(entry).union(*map(_recipes, entry.ranges))
        times = {SDPA.name: us_exact}
        tried = candidate_variants(spec, layer, recipes, call)
        # A first look at all, then with care at those that may be the fastest.
        for variant in (*tried, SDPA, *tried):
            us = None
            with only_this_one(layer, variant, spec):
                us = self.stopwatch.us(variant, call, spec, layer=layer.name)
            if us is not None:
                times[variant.name] = us
        ranges = tuple(_fastest(part, times) for part in entry.ranges)
        if len({part.variant for part in ranges}) == 1:
            # One kernel is accurate enough in every part and the fastest in each.
            (name,) = {part.variant for part in ranges}
            others = {**entry.alternatives, name: BY_NAME[name].numerics_version}
            return replace(_fastest(replace(entry, alternatives=others), times), ranges=())
        timed = _fastest(entry, times)
        if not ranges:
            return timed
        shown = [(part.us_chosen, part.end - part.start) for part in ranges]
        mean = sum(us * share for us, share in shown if us is not None)
        return replace(timed, ranges=ranges, us_chosen=mean)


def _recipes(part: PlanEntry | PlanRange) -> set[str]:
    """The recipes that are accurate enough in a part of a plan, exact attention aside."""
    names = {part.variant, *accurate_alternatives(part)} - {SDPA.name}
    return {BY_NAME[name].recipe.name for name in names}


def _fastest(part: _Part, times: Mapping[str, float]) -> _Part:
    """A part of a plan with the fastest of its accurate kernels that pay, else exact."""
    recipes = _recipes(part)
    us_exact = times[SDPA.name]
    serving = {
        name: us
        for name, us in times.items()
        if name == SDPA.name or BY_NAME[name].recipe.name in recipes
    }
    paying = [name for name, us in serving.items() if name == SDPA.name or pays(us, us_exact)]
    best = BY_NAME[min(paying, key=serving.__getitem__)]
    gain = f"{us_exact / times[best.name]:.2f}x exact"
    shown = "no accurate kernel serves it here" if len(serving) == 1 else gain
    accurate = {part.variant: part.numerics_version, **accurate_alternatives(part)}
    accurate.pop(SDPA.name, None)
    changes: dict[str, Any] = {
        "variant": best.name,
        "numerics_version": best.numerics_version,
        "reason": f"timed again on this GPU: {shown}; before: {part.reason}",
        "us_chosen": times[best.name],
        "alternatives": {name: v for name, v in accurate.items() if name != best.name},
    }
    if best.recipe != BY_NAME[part.variant].recipe:
        changes |= {name: None for name in _NO_ERRORS if hasattr(part, name)}
    if isinstance(part, PlanEntry):
        changes["us_exact"] = us_exact
    return replace(part, **changes)


def accurate_alternatives(entry: PlanEntry | PlanRange) -> dict[str, int]:
    """The entry's other admissible kernels whose numerics have not changed since."""
    return {
        name: version
        for name, version in entry.alternatives.items()
        if name in BY_NAME and BY_NAME[name].numerics_version == version
    }


def native(entry: PlanEntry) -> PlanEntry:
    """An emulated entry with the first kernel for its recipe; with exact attention where there is
    none, and the emulation's accuracy kept among the alternatives.
    """
    return replace(_native(entry), ranges=tuple(map(_native, entry.ranges)))


def _native(part: _Part) -> _Part:
    planned = BY_NAME[part.variant]
    if planned.toolchain != "emulated":
        return part
    for variant in CATALOGUE:
        usable = variant.toolchain != "emulated" and variant.withheld is None
        if usable and variant.recipe == planned.recipe:
            return _with(part, variant, f"{variant.name} for {planned.name} of the plan")
    kept = {planned.name: planned.numerics_version, **part.alternatives}
    exact = _with(part, SDPA, f"no kernel for {planned.name} of the plan")
    unknown: dict[str, Any] = {name: None for name in _NO_ERRORS if hasattr(part, name)}
    return replace(exact, alternatives=kept, **unknown)


def emulation(entry: PlanEntry) -> PlanEntry:
    """The entry with the emulation of its recipe for a kernel that needs a GPU."""
    return replace(_emulation(entry), ranges=tuple(map(_emulation, entry.ranges)))


def _emulation(part: _Part) -> _Part:
    planned = BY_NAME[part.variant]
    found = BY_NAME.get(f"emulated.{planned.recipe.name}")
    if found is None or found is planned:
        return part
    return _with(part, found, f"{found.name} for {planned.name} of the plan")


def _with(part: _Part, variant: Variant, why: str) -> _Part:
    version = variant.numerics_version
    changes: dict[str, Any] = {"variant": variant.name, "numerics_version": version}
    return replace(part, reason=f"{why}: {part.reason}", **changes)


def stale(entry: PlanEntry) -> str | None:
    """Why an entry is not to be followed: a kernel of it is gone or computes other numbers now."""
    parts: tuple[PlanEntry | PlanRange, ...] = (entry, *entry.ranges)
    for part in parts:
        known = BY_NAME.get(part.variant)
        if known is not None and known.numerics_version == part.numerics_version:
            continue
        now = "gone" if known is None else f"version {known.numerics_version} now"
        return (
            f"plan entry ignored: {part.variant} had numerics version {part.numerics_version}, "
            f"it is {now}; calibrate again"
        )
    return None
