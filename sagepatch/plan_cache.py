"""Plans kept on disk between runs, by model structure, machine and threshold; never a reason to
fail.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from sagepatch.env import Machine, cache_dir
from sagepatch.errors import MachineError, PlanError
from sagepatch.plan import Plan

logger = logging.getLogger("sagepatch")


def cached_plan(fingerprint: str, machine: Machine, threshold: float) -> Plan | None:
    """The plan kept for this model, machine and threshold; None where none is to be trusted."""
    try:
        path = _path(fingerprint, machine, threshold)
        if path is None or not path.exists():
            return None
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            logger.warning("sagepatch: %s belongs to another user and is not read", path)
            return None
        plan = Plan.load(path)
    except (MachineError, PlanError, OSError) as error:
        logger.warning("sagepatch: a kept plan is not used: %s", error)
        return None
    fits = (
        plan.fingerprint == fingerprint
        and plan.gpu == machine.gpu_name
        and plan.threshold == threshold
        and plan.versions == machine.versions
        and not plan.emulated
    )
    return plan if fits else None


def keep_plan(plan: Plan, machine: Machine) -> None:
    """Keep a plan for the next run; only one with timings of this machine's GPU is worth it."""
    if plan.emulated or plan.gpu != machine.gpu_name:
        return
    try:
        path = _path(plan.fingerprint, machine, plan.threshold)
        if path is not None:
            plan.save(path)
    except (MachineError, OSError) as error:
        logger.warning("sagepatch: the plan is not kept: %s", error)


def _path(fingerprint: str, machine: Machine, threshold: float) -> Path | None:
    root = cache_dir() if machine.gpus else None
    if root is None:
        return None
    key = hashlib.sha256(f"{machine.gpu_name} {threshold!r}".encode()).hexdigest()[:12]
    folder = root / "plans"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{fingerprint}-{key}.json"
