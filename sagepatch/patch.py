"""`Patch`: one patched pipeline or model, from installed layers to the way back. Chooses no kernel
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.costs import Costs
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.pace import Pace
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.reuse import FirstLook, TimeAgain, emulation, native, stale
from sagepatch.calibration.sample import FEWEST_SAMPLES
from sagepatch.calibration.table import Calibration
from sagepatch.dispatch import Request
from sagepatch.env import Machine
from sagepatch.layer import UNPLACED, PatchedLayer, Policy
from sagepatch.patchers.model import Parts, taken_out
from sagepatch.patchers.site import Found, Left, Swap
from sagepatch.plan import Plan, PlanEntry
from sagepatch.plan_cache import keep_plan
from sagepatch.schedule import Schedule
from sagepatch.settling import Settling

if TYPE_CHECKING:
    from sagepatch.report.model import Report

logger = logging.getLogger("sagepatch")

_OWNER = "_sagepatch_patch"


class Patch:
    """One patched pipeline or model: what was found, what each layer runs, and the way back.

    A context manager: entering it puts the patch in force, leaving it restores the model. `off` is
    a patch that changed nothing because SAGEPATCH_DISABLE is set.
    """

    def __init__(
        self,
        parts: Parts,
        found: Found,
        policy: Policy,
        threshold: float,
        *,
        mark: str = "",
        off: bool = False,
    ) -> None:
        self.parts = parts
        self.policy = policy
        self.threshold = threshold
        self.fingerprint = mark
        self.left: tuple[Left, ...] = found.left
        self.machine = Machine.here()
        self.off = off
        self.restored = True
        self.warnings: list[str] = []
        self.schedule = Schedule()
        self.layers: tuple[PatchedLayer, ...] = tuple(
            PatchedLayer(site.name, site.kind, policy, Request("exact"), unusable, self.schedule)
            for site in found.sites
        )
        self._sites = found.sites
        self._swaps: list[Swap] = []
        self._stopwatch = Stopwatch(policy)
        self._pace = Pace()
        self._costs = Costs()
        self._settles = True
        self._open = Settling()
        self._tables: dict[str, LayerCalibration] = {}
        self._entries: dict[str, PlanEntry] = {}
        self.install()

    @property
    def locked(self) -> bool:
        """Whether every layer is settled."""
        return all(layer.observer is None for layer in self.layers)

    def lock(self) -> Patch:
        """Settle every layer that is still open on what it has seen; returns itself."""
        for layer in self.layers:
            self._open.only(self._settle)(layer)
        return self

    def plan(self) -> Plan:
        """The plan in force; layers that still calibrate are exact in it, and demoted ones too."""
        for layer in self.layers:
            layer.ask_guards()
        entries = tuple(self._entry(layer) for layer in self.layers)
        machine = self.machine
        return Plan(
            self.fingerprint,
            self.parts.label,
            self.threshold,
            self.policy.emulate,
            machine.gpu_name,
            dict(machine.versions),
            entries,
        )

    def calibration(self) -> Calibration:
        """Everything measured so far; empty for a patch that follows a plan or a variant."""
        rows = tuple(
            self._tables[layer.name].table(layer)
            for layer in self.layers
            if layer.name in self._tables
        )
        machine = self.machine
        return Calibration(
            self.fingerprint,
            self.parts.label,
            self.policy.emulate,
            machine.gpu_name,
            dict(machine.versions),
            rows,
            run_seconds=self._pace.run_seconds,
            measuring_seconds=self._pace.measuring_seconds,
            preparing_seconds=self._pace.preparing_seconds,
        )

    def report(self) -> Report:
        """The per-layer report as of now; prints itself, `.to_json()`, `.to_html()`, `.plot()`."""
        from sagepatch.report.model import report_of

        for layer in self.layers:
            layer.ask_guards()
        return report_of(
            parts=self.parts.label,
            layers=self.layers,
            left=self.left,
            entries={layer.name: self._entry(layer) for layer in self.layers},
            replaced=self.replaced(),
            machine=self.machine,
            threshold=self.threshold,
            emulated=self.policy.emulate,
            warnings=self._all_warnings(),
            table=self.calibration(),
            in_force=not self.restored,
        )

    def replaced(self) -> dict[str, str]:
        """Layers that are no longer patched because a library call took our place, or the whole
        module's, and by what.
        """
        if self.restored:
            return {}
        states = zip(self.layers, self._swaps, strict=True)
        found = {layer.name: by for layer, swap in states if (by := swap.replaced_by()) is not None}
        return found | taken_out(self.parts, self._sites)

    def bare(self) -> list[str]:
        """Layers of the model on which no patch is in force, neither this one nor another."""
        gone = taken_out(self.parts, self._sites)
        here = (site for site in self._sites if site.name not in gone)
        return [site.name for site in here if not patches_on([site.module])]

    def at(self, step: int, steps: int) -> AbstractContextManager[None]:
        """Say that calls of this thread meanwhile belong to step `step` (from 0) of `steps`: for
        denoising loops of one's own. Pipelines of diffusers are read without it.

        >>> for i, t in enumerate(timesteps):
        ...     with patch.at(i, len(timesteps)):
        ...         noise = model(latents, t)
        """
        return self.schedule.at(step, steps)

    def restore(self) -> None:
        """Put everything back as it was; twice is harmless."""
        if self.restored:
            return
        for swap in reversed(self._swaps):
            swap.undo()
        for site in self._sites:
            owner = site.module.__dict__.get(_OWNER)
            if isinstance(owner, _Owner) and owner.patch is self:
                del site.module.__dict__[_OWNER]
        # Last: where an undo raises, restoring again takes up what is left.
        self.restored = True

    def install(self) -> None:
        """Put the patch in force, again after `restore` with what its layers have learnt; another
        one on these layers is taken back first.
        """
        if not self.restored:
            return
        for other in reversed(patches_on(site.module for site in self._sites)):
            other.restore()
        swaps: list[Swap] = []
        try:
            for site, layer in zip(self._sites, self.layers, strict=True):
                swaps.append(site.install(layer))
        except BaseException:
            for swap in reversed(swaps):
                swap.undo()
            raise
        self._swaps = swaps
        for site in self._sites:
            site.module.__dict__[_OWNER] = _Owner(self)
        self.restored = False

    def follow(self, plan: Plan) -> None:
        """Settle each layer as `plan` says; layers it does not name stay exact.

        On another GPU than the plan's, layers that may be quantised are timed again at their first
        call, with this GPU's kernels for the plan's recipes: a laptop can calibrate for a GPU. The
        other way about, `emulate=True` emulates a GPU's plan on a laptop.
        """
        here = self.machine
        self.threshold = plan.threshold
        by_site = {entry.site: entry for entry in plan.entries}
        elsewhere = plan.gpu != here.gpu_name
        again = bool(here.gpus) and not self.policy.emulate and (elsewhere or plan.emulated)
        if elsewhere or again:
            made = f"emulated on {plan.gpu}" if plan.emulated else f"timed on {plan.gpu}"
            then = "each layer is timed again at its first call" if again else "its speeds may not"
            told = f"the plan was {made}, this is {here.gpu_name}: its accuracy holds, {then}"
            self.warnings.append(told)
        take = self._open.only(self._take)
        for layer in self.layers:
            entry = by_site.get(layer.name)
            if entry is None:
                layer.run_with(Request("exact"), "the plan does not name this layer")
                continue
            outdated = stale(entry)
            if outdated is not None:
                self.warnings.append(f"{layer.name}: {outdated}")
                version = SDPA.numerics_version
                exact = PlanEntry(layer.name, layer.kind, SDPA.name, version, outdated)
                self._take(layer, exact)
                continue
            if again:
                entry = native(entry)
            elif self.policy.emulate and not here.gpus:
                entry = emulation(entry)
            self._entries[layer.name] = entry
            if again and set(entry.named) != {SDPA.name}:
                layer.reason = "to be timed on this GPU at its first call"
                layer.observer = TimeAgain(entry, self._stopwatch, take).observe
            else:
                self._take(layer, entry)

    def resume(self, plan: Plan) -> None:
        """Start from a plan kept on this machine: a layer whose first call is like those measured
        takes its entry; the others, and those seen too little, calibrate.
        """
        by_site = {entry.site: entry for entry in plan.entries}
        for layer in self.layers:
            entry = by_site.get(layer.name)
            outdated = None if entry is None else stale(entry)
            if outdated is not None:
                self.warnings.append(f"{layer.name}: {outdated}")
            if entry is None or entry.samples < FEWEST_SAMPLES or outdated is not None:
                self._measure(layer)
                continue
            kept = f"kept from an earlier run: {entry.reason}"
            layer.reason = "its first call decides whether the kept plan fits"
            take, measure = self._open.only(self._take), self._open.only(self._measure)
            look = FirstLook(entry, kept, take, measure)
            self._entries[layer.name] = entry
            layer.observer = look.observe

    def run_everywhere(self, request: Request) -> None:
        """Settle every layer on one request."""
        for layer in self.layers:
            layer.run_with(request, f"variant={request.variant!r} was asked for")

    def calibrate_itself(self, pace: Pace | None = None) -> None:
        """Let every layer measure its kernels on its first calls, or on those that a pace says,
        without end.
        """
        self._pace, self._settles = pace or Pace(), pace is None
        if not self.policy.emulate:
            self._pace.layers = len(self.layers)
        for layer in self.layers:
            self._measure(layer)

    def __enter__(self) -> Patch:
        # A second `with` on one patch: without this the model would run unpatched without a word.
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        if self.off:
            return f"<Patch of {self.parts.label}: off, SAGEPATCH_DISABLE is set>"
        state = "restored" if self.restored else ("locked" if self.locked else "calibrating")
        quantised = sum(layer.runs != SDPA.name for layer in self.layers)
        counts = f"{len(self.layers)} layers, {quantised} quantised"
        left = f", {len(self.left)} left alone" if self.left else ""
        return f"<Patch of {self.parts.label}: {counts}{left}, {state}>"

    def _measure(self, layer: PatchedLayer) -> None:
        # A second thread may come here for the same first call: keep what the first one began.
        done = self._open.only(self._settle) if self._settles else None
        made = LayerCalibration(self._stopwatch, done, self._pace, costs=self._costs)
        table = self._tables.setdefault(layer.name, made)
        self._entries.pop(layer.name, None)
        layer.reason = "still calibrating: exact until it has seen enough calls"
        layer.observer = table.observe

    def _settle(self, layer: PatchedLayer) -> None:
        table = self._tables.get(layer.name)
        if table is None:
            self._take(layer, self._entries[layer.name])
            return
        # The calls on the way to a lock are the first ones: they say nothing of later steps.
        self._take(layer, entry_at(table.table(layer), self.threshold, by_step=False))
        if self._worth_keeping():
            keep_plan(self.plan(), self.machine)

    def _worth_keeping(self) -> bool:
        """Whether every layer that was called at all is settled on enough samples."""
        # The entry of an open layer has no samples.
        called = [layer for layer in self.layers if layer.record.calls]
        return all(self._entry(layer).samples >= FEWEST_SAMPLES for layer in called)

    def _take(self, layer: PatchedLayer, entry: PlanEntry, reason: str | None = None) -> None:
        self._entries[layer.name] = entry
        parts = tuple((part.end, _request(part.variant)) for part in entry.ranges)
        why = reason or entry.reason
        layer.run_with(_request(entry.variant), why, planned=True, parts=parts)
        logger.info("sagepatch: layer %s runs %s: %s", layer.name, entry.variant, layer.reason)

    def _entry(self, layer: PatchedLayer) -> PlanEntry:
        known = self._entries.get(layer.name)
        if known is not None and layer.demoted is None and layer.observer is None:
            return known
        reason = layer.reason if layer.demoted is None else f"demoted: {layer.demoted}"
        runs = layer.runs
        return PlanEntry(layer.name, layer.kind, runs, BY_NAME[runs].numerics_version, reason)

    def _all_warnings(self) -> list[str]:
        off = ["SAGEPATCH_DISABLE is set: nothing is patched"] if self.off else []
        drifted = [text for layer in self.layers if (text := self._drift(layer)) is not None]
        more = f" (and {len(drifted) - 1} more layers so)" if len(drifted) > 1 else ""
        lost = [layer for layer in self.layers if layer.unplaced]
        calls = sum(layer.unplaced for layer in lost)
        unplaced = [f"{calls} calls of {len(lost)} layers: {UNPLACED}"] if lost else []
        drift = [text + more for text in drifted[:1]]
        return [*off, *self.warnings, *unplaced, *drift, *self._untried()]

    def _untried(self) -> list[str]:
        """Kernels that have served here on a kind of GPU where their tests have not run."""
        found = {
            f"{name}: {why}"
            for layer in self.layers
            for arch in {spec.arch for spec in layer.record.specs}
            for name in layer.record.by_variant
            if arch is not None and (why := BY_NAME[name].untried(arch)) is not None
        }
        return sorted(found)

    def _drift(self, layer: PatchedLayer) -> str | None:
        """A warning about calls unlike those that the layer's entry was measured on."""
        entry = self._entries.get(layer.name)
        if entry is None:
            return None
        for spec in list(layer.record.specs):
            if spec.q_len > 1 and not entry.measured_like(spec):
                return f"{layer.name}: measured on {entry.shape}, has also run {spec}"
        return None


def _request(variant: str) -> Request:
    return Request("exact" if variant == SDPA.name else variant)


class _Owner:
    """Ties a patch to a module for as long as that lives; a copy of the module gets None."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def patches_on(modules: Iterable[nn.Module]) -> list[Patch]:
    """The patches in force anywhere in these modules, be it on a part or on something larger."""
    owners = (part.__dict__.get(_OWNER) for module in modules for part in module.modules())
    return list(dict.fromkeys(owner.patch for owner in owners if isinstance(owner, _Owner)))
