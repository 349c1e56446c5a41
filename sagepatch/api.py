"""`apply`, `restore`, `calibrate`: a whole pipeline or model patched, measured, and taken back."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sagepatch.calibration.table import Calibration
from sagepatch.dispatch import Request
from sagepatch.env import disabled, set_log_level
from sagepatch.errors import InvalidArgument, MachineError, NothingPatched
from sagepatch.layer import Guard, Policy
from sagepatch.patch import Patch, patches_on
from sagepatch.patchers.model import Parts, fingerprint, parts_of, search
from sagepatch.patchers.site import Found
from sagepatch.plan import DEFAULT_THRESHOLD, Plan
from sagepatch.plan_cache import cached_plan

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
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise InvalidArgument(f"threshold is {threshold!r}, needs a number, usually 0.99 to 1")
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
    components: Sequence[str] | None = None,
    emulate: bool = False,
) -> Calibration:
    """Measure every layer's kernels while `run()` runs (or the pipeline draws each of `prompts`).

    Each layer is measured on its 1st, 2nd, 4th, 8th, 16th ... call. Outputs meanwhile are exact and
    the model comes back unpatched, whatever happens. Ctrl-C ends the run and keeps what was
    measured. Returns the full table of measurements; `calibration.plan(threshold)` solves it
    without running anything.

    >>> calibration = sagepatch.calibrate(pipe, run=lambda: pipe("a prompt"))
    >>> plan = calibration.plan(threshold=0.998)
    """
    if (run is None) == (not prompts):
        raise InvalidArgument("give run=<a callable> or prompts=[...], one of them")
    if isinstance(prompts, str):
        raise InvalidArgument(f"prompts is one string: pass a list, [{prompts!r}]")
    if prompts and isinstance(model, nn.Module):
        raise InvalidArgument("prompts are for pipelines; for one model give run=<a callable>")
    if disabled():
        raise MachineError("SAGEPATCH_DISABLE is set, so nothing can be measured: unset it")
    set_log_level()
    parts = parts_of(model, components)
    with _replacing_earlier(parts):
        found = search(parts)
        if not found.sites:
            raise NothingPatched(_nothing(parts, found))
        mark = fingerprint(parts, found)
        patch = Patch(parts, found, Policy(emulate=emulate), DEFAULT_THRESHOLD, mark=mark)
    patch.calibrate_itself(lock_when_done=False)
    try:
        if run is not None:
            run()
        for prompt in prompts or ():
            model(prompt)
    except KeyboardInterrupt:
        if all(layer.samples == 0 for layer in patch.calibration().layers):
            raise
        logger.warning("sagepatch: interrupted, what was measured so far is kept")
    finally:
        patch.restore()
        # Patches that the run made and left.
        restore(model)
    return patch.calibration()


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


def _nothing(parts: Parts, found: Found) -> str:
    looked = ", ".join(name or "all of it" for name in parts.modules) or "nothing"
    if not found.left:
        return f"no attention layer found in {parts.label} (looked at {looked})"
    reasons = "; ".join(sorted({left.reason for left in found.left}))
    return (
        f"none of the {len(found.left)} attention layers of {parts.label} can be patched: {reasons}"
    )
