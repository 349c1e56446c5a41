"""`apply`, `restore`, `calibrate`, `Patch`: a whole pipeline or model patched, and taken back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.dispatch import Request
from sagepatch.env import Machine, disabled
from sagepatch.errors import InvalidArgument, NothingPatched
from sagepatch.layer import Guard, PatchedLayer, Policy
from sagepatch.patchers.model import Parts, fingerprint, parts_of, search
from sagepatch.patchers.site import Found, Left, Site, Swap
from sagepatch.plan import Plan, PlanEntry
from sagepatch.plan_cache import cached_plan, keep_plan

if TYPE_CHECKING:
    from sagepatch.report.model import Report

logger = logging.getLogger("sagepatch")

_OWNER = "_sagepatch_patch"


def apply(
    model: Any,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    variant: str = "auto",
    threshold: float = 0.998,
    components: Sequence[str] | None = None,
    strict: bool = False,
    guard: Guard = "auto",
    emulate: bool = False,
) -> Patch:
    """Route every attention layer of a pipeline or model through sagepatch.

    Args:
        model: a diffusers pipeline (its denoisers; other parts only when named) or any `nn.Module`.
        plan: a `Plan` or the path of one; its layers are settled at once.
        variant: "auto" calibrates each layer on its first calls; a tier, a recipe or a full name is
            taken everywhere it can serve, without calibration.
        threshold: the least cosine similarity, in the worst head of every sample, that a quantised
            kernel must keep; above 1 nothing is admitted, at 0 everything finite is.
        components: parts of a pipeline to patch instead of the denoisers, by name.
        strict: raise where a layer would fall back to exact attention.
        guard: "auto" recomputes non-finite outputs where that costs no synchronisation, "sync"
            everywhere, "off" nowhere.
        emulate: admit emulated kernels: slow, to see accuracy on a machine without a GPU.

    Returns:
        The `Patch`: report, lock, restore. Patching again takes the earlier patch back first.

    Raises:
        NothingPatched: no attention layer was found that can be patched.
        PlanError: the plan is for another model; the model is untouched.
        InvalidArgument: an argument that makes no sense.

    >>> patch = sagepatch.apply(pipe)
    >>> image = pipe("a red apple").images[0]
    >>> print(patch.report())
    """
    if guard not in ("auto", "sync", "off"):
        raise InvalidArgument(f"guard is {guard!r}, needs 'auto', 'sync' or 'off'")
    if plan is not None and variant != "auto":
        raise InvalidArgument(
            "plan and variant exclude each other: a plan names each layer's variant"
        )
    request = Request(variant, emulate)
    loaded = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    parts = parts_of(model, components)
    if disabled():
        logger.warning("sagepatch: SAGEPATCH_DISABLE is set, nothing is patched")
        return Patch(parts, Found((), ()), Policy(), threshold, off=True)
    for earlier in _patches_on(parts):
        earlier.restore()
    found = search(parts)
    if not found.sites:
        raise NothingPatched(_nothing(parts, found))
    mark = fingerprint(parts, found)
    if loaded is not None:
        loaded.check(mark, [site.name for site in found.sites])
    patch = Patch(parts, found, Policy(strict, guard, emulate), threshold, mark=mark)
    if loaded is not None:
        patch.follow(loaded)
    elif variant != "auto":
        patch.run_everywhere(request)
    else:
        known = None if emulate else cached_plan(mark, patch.machine, threshold)
        if known is None:
            patch.calibrate_itself()
        else:
            patch.follow(known, origin="from the plan cache: ")
    return patch


def restore(model: Any) -> None:
    """Take back every patch on a pipeline or model; harmless on one that has none."""
    for patch in _patches_on(parts_of(model, None, every=True)):
        patch.restore()


def calibrate(
    model: Any,
    run: Callable[[], object] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    components: Sequence[str] | None = None,
    emulate: bool = False,
) -> Calibration:
    """Measure every layer's kernels while `run()` runs (or the pipeline draws each of `prompts`).

    Outputs meanwhile are exact and the model comes back unpatched, whatever happens. Returns the
    full table of measurements; `calibration.plan(threshold)` solves it without running anything.

    >>> calibration = sagepatch.calibrate(pipe, run=lambda: pipe("a prompt"))
    >>> plan = calibration.plan(threshold=0.998)
    """
    if (run is None) == (not prompts):
        raise InvalidArgument("give run=<a callable> or prompts=[...], one of them")
    parts = parts_of(model, components)
    for earlier in _patches_on(parts):
        earlier.restore()
    found = search(parts)
    if not found.sites:
        raise NothingPatched(_nothing(parts, found))
    patch = Patch(parts, found, Policy(emulate=emulate), 0.998, mark=fingerprint(parts, found))
    patch.calibrate_itself(lock_when_done=False)
    try:
        if run is not None:
            run()
        for prompt in prompts or ():
            model(prompt)
    finally:
        patch.restore()
    return patch.calibration()


class Patch:
    """One patched pipeline or model: what was found, what each layer runs, and the way back.

    A context manager: leaving it restores the model.
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
        self.restored = False
        self.warnings: list[str] = []
        self.layers: tuple[PatchedLayer, ...] = tuple(
            PatchedLayer(site.name, site.kind, policy, Request("exact"), unusable)
            for site in found.sites
        )
        self._tables: dict[str, LayerCalibration] = {}
        self._entries: dict[str, PlanEntry] = {}
        self._swaps = self._install(found.sites)
        for part in parts.modules.values():
            part.__dict__[_OWNER] = _Owner(self)

    @property
    def locked(self) -> bool:
        """Whether every layer is settled."""
        return all(layer.observer is None for layer in self.layers)

    def lock(self) -> Patch:
        """Settle every layer that still calibrates on what it has seen; returns itself."""
        for layer in self.layers:
            if layer.observer is not None:
                self._settle(layer)
        return self

    def plan(self) -> Plan:
        """The plan in force; layers that still calibrate are exact in it."""
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
        """Everything measured so far."""
        rows = tuple(
            LayerTable.of(layer.name, layer.kind, self._tables[layer.name])
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
        )

    def report(self) -> Report:
        """The per-layer report as of now; prints itself, `.to_json()`, `.to_html()`, `.plot()`."""
        from sagepatch.report.model import report_of

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
        )

    def replaced(self) -> dict[str, str]:
        """Layers that are no longer patched because a library call took our place, and by what."""
        if self.restored:
            return {}
        states = zip(self.layers, self._swaps, strict=True)
        return {layer.name: by for layer, swap in states if (by := swap.replaced_by()) is not None}

    def restore(self) -> None:
        """Put everything back as it was; twice is harmless."""
        if self.restored:
            return
        self.restored = True
        for swap in reversed(self._swaps):
            swap.undo()
        for part in self.parts.modules.values():
            owner = part.__dict__.get(_OWNER)
            if isinstance(owner, _Owner) and owner.patch is self:
                del part.__dict__[_OWNER]

    def follow(self, plan: Plan, origin: str = "") -> None:
        """Settle each layer as `plan` says; layers it does not name stay exact."""
        by_site = {entry.site: entry for entry in plan.entries}
        if plan.gpu != self.machine.gpu_name:
            self.warnings.append(
                f"the plan was timed on {plan.gpu}, this is {self.machine.gpu_name}: "
                "its accuracy holds, its speeds may not; calibrate here to time again"
            )
        for layer in self.layers:
            entry = by_site.get(layer.name)
            if entry is None:
                layer.run_with(Request("exact"), f"{origin}the plan does not name this layer")
                continue
            self._entries[layer.name] = entry
            known = BY_NAME.get(entry.variant)
            if known is None or known.numerics_version != entry.numerics_version:
                now = "gone" if known is None else f"version {known.numerics_version} now"
                reason = (
                    f"{origin}plan entry ignored: {entry.variant} had numerics version "
                    f"{entry.numerics_version}, it is {now}; calibrate again"
                )
                self.warnings.append(f"{layer.name}: {reason}")
                layer.run_with(Request("exact"), reason)
            else:
                layer.run_with(_settled(entry.variant), origin + entry.reason)

    def run_everywhere(self, request: Request) -> None:
        """Settle every layer on one request."""
        for layer in self.layers:
            layer.run_with(request, f"variant={request.variant!r} was asked for")

    def calibrate_itself(self, *, lock_when_done: bool = True) -> None:
        """Let every layer measure its kernels on its first calls."""
        for layer in self.layers:
            table = LayerCalibration(done=self._settle if lock_when_done else None)
            self._tables[layer.name] = table
            layer.reason = "still calibrating: exact until it has seen enough calls"
            layer.observer = table.observe

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        if self.off:
            return "<Patch: off, SAGEPATCH_DISABLE is set>"
        state = "restored" if self.restored else ("locked" if self.locked else "calibrating")
        return f"<Patch of {self.parts.label}: {len(self.layers)} layers, {state}>"

    def _settle(self, layer: PatchedLayer) -> None:
        table = self._tables[layer.name]
        row = LayerTable.of(layer.name, layer.kind, table)
        entry = row.entry(self.threshold)
        self._entries[layer.name] = entry
        layer.run_with(_settled(entry.variant), entry.reason)
        if self.locked and not self.policy.emulate and not self.restored and self._tables:
            keep_plan(self.plan(), self.machine)

    def _entry(self, layer: PatchedLayer) -> PlanEntry:
        known = self._entries.get(layer.name)
        if known is not None:
            return known
        variant = layer.request.variant if layer.request.by_full_name else SDPA.name
        version = BY_NAME[variant].numerics_version
        return PlanEntry(layer.name, layer.kind, variant, version, layer.reason)

    def _all_warnings(self) -> list[str]:
        found = list(self.warnings)
        for layer in self.layers:
            entry = self._entries.get(layer.name)
            found += [] if entry is None else _drift(layer, entry)
        return found

    def _install(self, sites: Sequence[Site]) -> list[Swap]:
        swaps: list[Swap] = []
        try:
            for site, layer in zip(sites, self.layers, strict=True):
                swaps.append(site.install(layer))
        except BaseException:
            for swap in reversed(swaps):
                swap.undo()
            raise
        return swaps


class _Owner:
    """Ties a patch to a model for as long as the model lives; a copy of the model gets None."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _patches_on(parts: Parts) -> list[Patch]:
    owners = (part.__dict__.get(_OWNER) for part in parts.modules.values())
    return list(dict.fromkeys(o.patch for o in owners if isinstance(o, _Owner)))


def _settled(variant: str) -> Request:
    return Request("exact") if variant == SDPA.name else Request(variant)


def _drift(layer: PatchedLayer, entry: PlanEntry) -> list[str]:
    """Warnings about calls unlike those that the layer's plan entry was measured on."""
    if entry.shape is None:
        return []
    unlike = [spec for spec in layer.record.specs if f"{spec}" != entry.shape and spec.q_len > 1]
    if not unlike:
        return []
    return [f"{layer.name}: measured on {entry.shape}, has also run {unlike[0]}"]


def _nothing(parts: Parts, found: Found) -> str:
    looked = ", ".join(parts.modules) or "nothing"
    if not found.left:
        return f"no attention layer found in {parts.label} (looked at {looked})"
    reasons = "; ".join(sorted({left.reason for left in found.left}))
    return (
        f"none of the {len(found.left)} attention layers of {parts.label} can be patched: {reasons}"
    )
