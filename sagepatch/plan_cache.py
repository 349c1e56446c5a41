"""Plans kept on disk between runs, by model structure, GPU, threshold, versions of the libraries
and of the kernels; never a reason to fail.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.env import Machine, cache_dir
from sagepatch.errors import MachineError, PlanError
from sagepatch.plan import Plan

logger = logging.getLogger("sagepatch")

# For one model, GPU and threshold there is a plan for each set of library versions that was used;
# the newest ones are kept, this many.
MOST_KEPT = 4


def cached_plan(fingerprint: str, machine: Machine, threshold: float) -> Plan | None:
    """The plan kept for this model, machine and threshold; None where none is to be trusted."""
    try:
        path = _path(fingerprint, machine, threshold)
        plan = None if path is None or not path.exists() else _read(path)
    except (MachineError, OSError) as error:
        logger.warning("sagepatch: a kept plan is not used: %s", error)
        return None
    fits = (
        plan is not None
        and plan.fingerprint == fingerprint
        and plan.gpu == machine.gpu_name
        and plan.threshold == threshold
        and plan.versions == machine.versions
        and not plan.emulated
    )
    return plan if fits else None


def stale_plans(fingerprint: str, machine: Machine, threshold: float) -> list[str]:
    """A sentence for each kept plan that would fit but for the versions that it was made with."""
    try:
        path = _path(fingerprint, machine, threshold)
        others = [] if path is None else [one for one in _siblings(path) if one != path]
        found = [(one, plan) for one in others if (plan := _read(one)) is not None]
    except (MachineError, OSError) as error:
        logger.warning("sagepatch: kept plans cannot be listed: %s", error)
        return []
    return [
        f"a kept plan is not used, it was made with {_differences(plan, machine)}: {one}"
        for one, plan in found
    ]


def keep_plan(plan: Plan, machine: Machine) -> None:
    """Keep a plan for the next run; only one with timings of this machine's GPU is worth it."""
    if plan.emulated or plan.gpu != machine.gpu_name:
        return
    try:
        path = _path(plan.fingerprint, machine, plan.threshold)
        if path is None:
            return
        plan.save(path)
        for old in _siblings(path)[MOST_KEPT:]:
            old.unlink(missing_ok=True)
    except (MachineError, OSError) as error:
        logger.warning("sagepatch: the plan is not kept: %s", error)


def _read(path: Path) -> Plan | None:
    """A kept plan; None, and a warning, where it is another user's or no plan. None, too, where
    another process has just taken it away.
    """
    if not path.exists():
        return None
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        logger.warning("sagepatch: %s belongs to another user and is not read", path)
        return None
    try:
        return Plan.load(path)
    except PlanError as error:
        logger.warning("sagepatch: a kept plan is not used: %s", error)
        return None


def _differences(plan: Plan, machine: Machine) -> str:
    """What a plan was made with that is otherwise here."""
    names = dict.fromkeys((*plan.versions, *machine.versions))
    told = [
        f"{name} {plan.versions.get(name)} (here {machine.versions.get(name)})"
        for name in names
        if plan.versions.get(name) != machine.versions.get(name)
    ]
    kernels = {entry.variant: entry.numerics_version for entry in plan.entries}
    for name, version in kernels.items():
        known = BY_NAME.get(name)
        if known is None or known.numerics_version != version:
            now = "gone" if known is None else f"version {known.numerics_version}"
            told.append(f"version {version} of {name} (here {now})")
    return ", ".join(told) or "other versions of the kernels"


def _path(fingerprint: str, machine: Machine, threshold: float) -> Path | None:
    root = cache_dir() if machine.gpus else None
    if root is None:
        return None
    folder = root / "plans"
    folder.mkdir(mode=0o700, exist_ok=True)
    place = _key([machine.gpu_name, repr(threshold)])
    kernels = (f"{name} {variant.numerics_version}" for name, variant in BY_NAME.items())
    versions = (f"{name} {version}" for name, version in sorted(machine.versions.items()))
    return folder / f"{fingerprint}-{place}-{_key([*versions, *kernels])}.json"


def _siblings(path: Path) -> list[Path]:
    """The kept plans of the same model, GPU and threshold, the newest first."""
    same = path.name.rpartition("-")[0]
    made: dict[Path, float] = {}
    for one in path.parent.glob(f"{same}-*.json"):
        # Another process may take an old one away meanwhile.
        with suppress(FileNotFoundError):
            made[one] = one.stat().st_mtime
    return sorted(made, key=lambda one: made[one], reverse=True)


def _key(facts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
