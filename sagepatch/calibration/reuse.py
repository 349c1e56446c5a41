"""A plan entry made earlier or elsewhere, before a layer settles on it: a kept one is checked
against the layer's first call, one of another GPU is timed again on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, SDPA
from sagepatch.calibration.capture import candidate_variants, refuse_capture
from sagepatch.calibration.measure import Stopwatch
from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_exact
from sagepatch.plan import PlanEntry
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

# A kept entry serves lengths within this factor of those measured; prompts vary.
KEPT_FACTOR = 2.0
# An entry's errors were measured with its own recipe: another one's are not in the plan.
_NO_ERRORS: dict[str, Any] = dict.fromkeys(
    ("cosine", "cosine_mean", "rel_l1", "rmse", "norm_ratio", "worst_head", "worst_call")
)


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
        spec = call.spec()
        if spec.q_len <= 1:
            return run_exact(call)
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
        spec = call.spec()
        us_exact = self.stopwatch.us(SDPA, call, spec) if spec.q_len > 1 else None
        if us_exact is None:
            return run_exact(call)
        self.settle(layer, self._timed(layer, call, spec, us_exact))
        return None

    def _timed(self, layer: PatchedLayer, call: Call, spec: AttnSpec, us_exact: float) -> PlanEntry:
        entry = self.entry
        accurate = {entry.variant: entry.numerics_version, **accurate_alternatives(entry)}
        accurate.pop(SDPA.name, None)
        recipes = {BY_NAME[name].recipe.name for name in accurate}
        times = {SDPA.name: us_exact}
        for variant in candidate_variants(spec, layer, recipes):
            us = self.stopwatch.us(variant, call, spec)
            if us is not None:
                times[variant.name] = us
        best = BY_NAME[min(times, key=times.__getitem__)]
        gain = f"{us_exact / times[best.name]:.2f}x exact"
        shown = "no accurate kernel serves it here" if len(times) == 1 else gain
        errors = {} if best.recipe == BY_NAME[entry.variant].recipe else _NO_ERRORS
        return replace(
            entry,
            variant=best.name,
            numerics_version=best.numerics_version,
            reason=f"timed again on this GPU: {shown}; before: {entry.reason}",
            us_exact=us_exact,
            us_chosen=times[best.name],
            alternatives={name: v for name, v in accurate.items() if name != best.name},
            **errors,
        )


def accurate_alternatives(entry: PlanEntry) -> dict[str, int]:
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
    planned = BY_NAME[entry.variant]
    if planned.toolchain != "emulated":
        return entry
    for variant in CATALOGUE:
        usable = variant.toolchain != "emulated" and variant.withheld is None
        if usable and variant.recipe == planned.recipe:
            return _with(entry, variant, f"{variant.name} for {planned.name} of the plan")
    kept = {planned.name: planned.numerics_version, **entry.alternatives}
    exact = _with(entry, SDPA, f"no kernel for {planned.name} of the plan")
    return replace(exact, alternatives=kept, **_NO_ERRORS)


def emulation(entry: PlanEntry) -> PlanEntry:
    """The entry with the emulation of its recipe for a kernel that needs a GPU."""
    planned = BY_NAME[entry.variant]
    found = BY_NAME.get(f"emulated.{planned.recipe.name}")
    if found is None or found is planned:
        return entry
    return _with(entry, found, f"{found.name} for {planned.name} of the plan")


def _with(entry: PlanEntry, variant: Variant, why: str) -> PlanEntry:
    version = variant.numerics_version
    reason = f"{why}: {entry.reason}"
    return replace(entry, variant=variant.name, numerics_version=version, reason=reason)


def stale(entry: PlanEntry) -> str | None:
    """Why an entry is not to be followed: its kernel is gone or computes other numbers now."""
    known = BY_NAME.get(entry.variant)
    if known is not None and known.numerics_version == entry.numerics_version:
        return None
    now = "gone" if known is None else f"version {known.numerics_version} now"
    return (
        f"plan entry ignored: {entry.variant} had numerics version {entry.numerics_version}, "
        f"it is {now}; calibrate again"
    )
