"""Plans kept on disk between runs, by model structure, GPU and threshold."""

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
    if not machine.gpus:
        return None
    path = _path(fingerprint, machine, threshold)
    if not path.exists():
        return None
    if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
        logger.warning("sagepatch: %s belongs to another user and is not read", path)
        return None
    try:
        plan = Plan.load(path)
    except PlanError as error:
        logger.warning("sagepatch: a kept plan is not used: %s", error)
        return None
    return plan if plan.fingerprint == fingerprint and plan.versions == machine.versions else None


def keep_plan(plan: Plan, machine: Machine) -> None:
    """Keep a plan for the next run; only plans with timings of a GPU are worth it."""
    if not machine.gpus:
        return
    try:
        plan.save(_path(plan.fingerprint, machine, plan.threshold))
    except MachineError as error:
        logger.warning("sagepatch: the plan is not kept: %s", error)


def _path(fingerprint: str, machine: Machine, threshold: float) -> Path:
    key = hashlib.sha256(f"{machine.gpu_name} {threshold!r}".encode()).hexdigest()[:12]
    folder = cache_dir() / "plans"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{fingerprint}-{key}.json"
