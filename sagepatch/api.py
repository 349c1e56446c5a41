"""`apply`, `restore`, `calibrate`: a whole pipeline or model patched, measured, and taken back."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sagepatch.arguments import check_flags, shown
from sagepatch.calibration.choose import check_bound
from sagepatch.calibration.merge import check_alike, merged
from sagepatch.calibration.pace import Pace
from sagepatch.calibration.table import Calibration
from sagepatch.dispatch import Request
from sagepatch.env import Machine, disabled, set_log_level
from sagepatch.errors import InvalidArgument, MachineError, NothingPatched, PlanError
from sagepatch.layer import Guard, Policy
from sagepatch.patch import Patch, patches_on
from sagepatch.patchers.model import Parts, fingerprint, parts_of, search
from sagepatch.patchers.site import Found
from sagepatch.plan import DEFAULT_THRESHOLD, Plan
from sagepatch.plan_cache import cached_plan, stale_plans

__all__ = ["Patch", "apply", "calibrate", "restore"]

logger = logging.getLogger("sagepatch")


def apply(
    model: Any,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    variant: str = "auto",
    threshold: float = DEFAULT_THRESHOLD,
    components: Sequence[str] | None = None,
    strict: bool = False,
    guard: Guard = "auto",
    emulate: bool = False,
) -> Patch:
    """Route every attention layer of a pipeline or model through sagepatch.

    Args:
        model: a diffusers pipeline (its denoisers; other parts only when named) or any `nn.Module`.
        plan: a `Plan` or the path of one; its layers are settled at once (one made on another GPU
            is timed again here, at each layer's first call).
        variant: "auto" calibrates each layer on its first calls; a tier, a recipe or a full name is
            taken everywhere it can serve, without calibration.
        threshold: the least cosine similarity, in the worst head of every sample, that a quantised
            kernel must keep; above 1 nothing is admitted, at 0 everything finite is. A plan has its
            own.
        components: parts of a pipeline to patch instead of the denoisers, by name.
        strict: raise where a layer would fall back to exact attention.
        guard: "auto" recomputes non-finite outputs where that costs no synchronisation, "sync"
            everywhere, "off" nowhere.
        emulate: admit emulated kernels: slow, to see accuracy on a machine without a GPU.

    Returns:
        The `Patch`: report, lock, restore. Patching again takes earlier patches back first.

    Raises:
        NothingPatched: no attention layer was found that can be patched.
        PlanError: the plan is for another model.
        InvalidArgument: an argument that makes no sense.
        In each case the model, and an earlier patch on it, are as they were.

    >>> patch = sagepatch.apply(pipe)
    >>> image = pipe("a red apple").images[0]
    >>> print(patch.report())
    """
    if guard not in ("auto", "sync", "off"):
        raise InvalidArgument(f"guard is {guard!r}, needs 'auto', 'sync' or 'off'")
    check_bound("threshold", threshold)
    if not math.isfinite(threshold):
        raise InvalidArgument(f"threshold is {threshold!r}, needs a number, usually 0.99 to 1")
    check_flags([("strict", strict), ("emulate", emulate)])
    _check_components(components)
    if plan is not None and not isinstance(plan, Plan | str | os.PathLike):
        raise InvalidArgument(f"plan is {shown(plan)}, needs a Plan or the path of one")
    if plan is not None and variant != "auto":
        raise InvalidArgument(
            "plan and variant exclude each other: a plan names each layer's variant"
        )
    set_log_level()
    request = Request(variant, emulate)
    loaded = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    if loaded is not None and threshold not in (DEFAULT_THRESHOLD, loaded.threshold):
        raise InvalidArgument(
            f"the plan was solved for a threshold of {loaded.threshold:g}, not {threshold:g}: "
            "leave the threshold out, or solve anew with calibration.plan(threshold)"
        )
    parts = parts_of(model, components)
    if disabled():
        restore(model)
        logger.warning("sagepatch: SAGEPATCH_DISABLE is set, nothing is patched")
        return Patch(parts, Found((), ()), Policy(), threshold, off=True)
    with _replacing_earlier(parts):
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
        kept = None if emulate else cached_plan(mark, patch.machine, threshold)
        if kept is None:
            if not emulate:
                patch.warnings += stale_plans(mark, patch.machine, threshold)
            patch.calibrate_itself()
        else:
            patch.resume(kept)
    return patch


def restore(model: Any) -> None:
    """Take back every patch on a pipeline or model; harmless on one that has none."""
    for patch in reversed(patches_on(parts_of(model, None, every=True).modules.values())):
        patch.restore()


def calibrate(
    model: Any,
    run: Callable[[], object] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    table: str | os.PathLike[str] | None = None,
    components: Sequence[str] | None = None,
    emulate: bool = False,
) -> Calibration:
    """Measure every layer's kernels while `run()` runs (or the pipeline draws each of `prompts`).

    In a pipeline up to 8 denoising steps are measured, spread over the schedule, as many as the
    run's own time pays for, the first and the last always; elsewhere a layer's 1st, 2nd, 4th, 8th
    ... call. Outputs meanwhile are exact and the model comes back unpatched, whatever happens.
    Ctrl-C ends the run and keeps what was measured. Returns the full table of measurements;
    `calibration.plan(threshold)` solves it without running anything.

    Args:
        model: a diffusers pipeline or any `nn.Module`.
        run: makes the calls to measure.
        prompts: what the pipeline is to draw instead, one after the other.
        table: a file that keeps the measurements after each generation. Where it exists already the
            calibration goes on from it: prompts that it holds are not drawn again.
        components: parts of a pipeline to measure instead of the denoisers, by name.
        emulate: measure emulated kernels: slow, for a machine without a GPU.

    Raises:
        PlanError: `table` is of another model, or no table.
        InvalidArgument: it was made on another GPU or with other versions, whose times do not hold.

    >>> calibration = sagepatch.calibrate(pipe, run=lambda: pipe("a prompt"))
    >>> plan = calibration.plan(threshold=0.998)
    """
    if prompts is not None and not isinstance(prompts, Iterable):
        raise InvalidArgument(f"prompts is {shown(prompts)}, needs a list of them")
    if run is not None and not callable(run):
        raise InvalidArgument(f"run is {shown(run)}, needs a callable such as lambda: pipe(prompt)")
    if (run is None) == (not prompts):
        raise InvalidArgument("give run=<a callable> or prompts=[...], one of them")
    if isinstance(prompts, str):
        raise InvalidArgument(f"prompts is one string: pass a list, [{prompts!r}]")
    if prompts and isinstance(model, nn.Module):
        raise InvalidArgument("prompts are for pipelines; for one model give run=<a callable>")
    runs: list[tuple[str, Callable[[], object]]] = [] if run is None else [("", run)]
    runs += [(run_name(prompt), partial(model, prompt)) for prompt in prompts or ()]
    return calibrate_runs(model, runs, table=table, components=components, emulate=emulate)


def run_name(*facts: object) -> str:
    """The name of a generation in a table: a short hash of what makes it, its prompt and seed."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def calibrate_runs(
    model: Any,
    runs: Iterable[tuple[str, Callable[[], object]]],
    *,
    table: str | os.PathLike[str] | None = None,
    components: Sequence[str] | None = None,
    emulate: bool = False,
) -> Calibration:
    """`calibrate` for generations that have names: those that `table` holds are not run again. A
    run without a name ("") always runs.
    """
    check_flags([("emulate", emulate)])
    _check_components(components)
    if table is not None and not isinstance(table, str | os.PathLike):
        raise InvalidArgument(f"table is {shown(table)}, needs the path of a file")
    if disabled():
        raise MachineError("SAGEPATCH_DISABLE is set, so nothing can be measured: unset it")
    set_log_level()
    kept = Calibration.load(table) if table is not None and Path(table).exists() else None
    parts = parts_of(model, components)
    with _replacing_earlier(parts):
        found = search(parts)
        if not found.sites:
            raise NothingPatched(_nothing(parts, found))
        mark = fingerprint(parts, found)
        if kept is not None:
            _check_table(kept, mark, emulate, os.fspath(table or ""))
        patch = Patch(parts, found, Policy(emulate=emulate), DEFAULT_THRESHOLD, mark=mark)
    # A step counts once, though every layer that runs in it has a row of it.
    rows = () if kept is None else (row for layer in kept.layers for row in layer.rows)
    before = {(row.run, row.step): row.at for row in rows}
    pace = Pace(held=[at for at in before.values() if at is not None])
    patch.calibrate_itself(pace)
    done: list[str] = []

    def measured() -> Calibration:
        now = replace(patch.calibration(), runs=tuple(done))
        return now if kept is None else merged((kept, now))

    try:
        for name, run in runs:
            if name in done or (kept is not None and name in kept.runs):
                logger.info("sagepatch: run %s was measured before", name)
                continue
            with pace.running(name):
                run()
            done += [name] if name else []
            if table is not None:
                measured().save(table)
    except KeyboardInterrupt:
        if all(layer.samples == 0 for layer in measured().layers):
            raise
        logger.warning("sagepatch: interrupted, what was measured so far is kept")
    finally:
        patch.restore()
        # Patches that the run made and left.
        restore(model)
        if table is not None and any(layer.samples for layer in patch.calibration().layers):
            measured().save(table)
    return measured()


def _check_table(kept: Calibration, mark: str, emulate: bool, path: str) -> None:
    """Refuse to go on from measurements of another model, GPU, version or setting."""
    if kept.fingerprint != mark:
        raise PlanError(
            f"{path} was measured on another model ({kept.model}, structure {kept.fingerprint}; "
            f"this one is {mark}): name another file"
        )
    if kept.stale:
        raise InvalidArgument(
            f"{path} cannot be gone on from: {'; '.join(kept.stale)}; name another file"
        )
    here = Machine.here()
    versions = dict(here.versions)
    now = replace(kept, emulated=emulate, gpu=here.gpu_name, versions=versions)
    try:
        check_alike((kept, now))
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{path} cannot be gone on from: {error}; name another file, or follow its plan, "
            "which is timed again here"
        ) from None


def _check_components(components: object) -> None:
    """Refuse what are no names of a pipeline's parts; one string is told of where they are read."""
    if components is None or isinstance(components, str):
        return
    if not isinstance(components, Iterable):
        raise InvalidArgument(f"components is {shown(components)}, needs a list of names")
    wrong = next((one for one in components if not isinstance(one, str)), None)
    if wrong is not None:
        raise InvalidArgument(f"components holds {shown(wrong)}, needs names of parts")


@contextmanager
def _replacing_earlier(parts: Parts) -> Iterator[None]:
    """Take back earlier patches on these parts; put them in force again where the new one fails."""
    earlier = patches_on(parts.modules.values())
    for patch in reversed(earlier):
        patch.restore()
    try:
        yield
    except BaseException:
        for patch in earlier:
            patch.install()
        raise
    for patch in earlier:
        bare = patch.bare()
        if bare:
            logger.warning(
                "sagepatch: an earlier patch of %s was taken back for a new one, which has fewer "
                "layers: %d run unpatched now, %s among them",
                patch.parts.label,
                len(bare),
                bare[0],
            )


def _nothing(parts: Parts, found: Found) -> str:
    looked = ", ".join(name or "all of it" for name in parts.modules) or "nothing"
    if not found.left:
        return f"no attention layer found in {parts.label} (looked at {looked})"
    reasons = "; ".join(sorted({left.reason for left in found.left}))
    return (
        f"none of the {len(found.left)} attention layers of {parts.label} can be patched: {reasons}"
    )
