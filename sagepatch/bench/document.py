"""The file that a bench leaves, for people who collect them: machine, versions, kernels, times. It
says nothing about whose machine it is.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from sagepatch.bench.collect import Results
from sagepatch.bench.gpu import GpuFacts
from sagepatch.bench.measure import Measured
from sagepatch.env import VERSION, Machine

SCHEMA = 1
KIND = "sagepatch bench"
PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".cu", ".cuh")
# Fields that hold what a compiler, a driver or a system said: paths and names may be in it.
TOLD = ("problems", "why", "fault", "left_out")


def document(results: Results, machine: Machine, device: torch.device) -> dict[str, Any]:
    """The file as plain values for JSON; docs/bench.schema.json describes it."""
    gpu = GpuFacts.of(device) if device.type == "cuda" else None
    made = {
        "kind": KIND,
        "schema": SCHEMA,
        "made": datetime.now(UTC).date().isoformat(),
        "seconds": round(results.seconds, 1),
        "budget_s": results.budget_s,
        "dtype": results.dtype,
        "code": code(),
        "machine": machine.to_dict(),
        "gpu": None if gpu is None else asdict(gpu),
        "kernels": [asdict(check) for check in results.checks],
        "shapes": [_shape(one) for one in results.measured],
        "rows": [asdict(row) for row in results.rows],
    }
    plain: dict[str, Any] = _plain(made, private())
    return plain


def code() -> dict[str, Any]:
    """Which sagepatch ran: version, commit where it is known, whether files were changed since, and
    one hash of all its sources.
    """
    commit, changed = _checkout() or (_installed_commit(), None)
    digest = sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in SOURCES):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "version": VERSION,
        "commit": commit,
        "changed": changed,
        "sources": digest.hexdigest()[:16],
    }


def private() -> list[tuple[str, str]]:
    """What must not leave the machine, as patterns, and what stands for it: the folders of the
    package and of the user, the names of the user and of the host.
    """
    found = [(re.escape(str(PACKAGE.parent)), "<sagepatch>")]
    # A user may have neither a home nor a name.
    with contextlib.suppress(RuntimeError, KeyError, OSError, ImportError):
        found.append((re.escape(str(Path.home())), "~"))
        found.append((rf"\b{re.escape(getpass.getuser())}\b", "<user>"))
    if host := platform.node():
        found.append((rf"\b{re.escape(host)}\b", "<host>"))
    return found


def _plain(value: Any, secrets: Sequence[tuple[str, str]], told: bool = False) -> Any:
    """Values for JSON: no number that is not finite, nothing private in what was told."""
    if isinstance(value, dict):
        return {key: _plain(one, secrets, told or key in TOLD) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, secrets, told) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str) and told:
        for pattern, instead in secrets:
            value = re.sub(pattern, instead, value)
    return value


def text(made: dict[str, Any]) -> str:
    """The file's text."""
    return json.dumps(made, indent=1, allow_nan=False) + "\n"


def _shape(one: Measured) -> dict[str, Any]:
    return {
        **asdict(one.shape),
        "flops": one.shape.flops,
        "load": None if one.load is None else asdict(one.load),
        "left_out": one.left_out,
    }


def _checkout() -> tuple[str, bool] | None:
    """Commit of the checkout that the package lies in, and whether its files differ from it."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit, bool(_git(root, "status", "--porcelain", "--", PACKAGE.name))


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _installed_commit() -> str | None:
    """The commit that pip installed from, where it installed from a repository."""
    try:
        said = distribution("sagepatch").read_text("direct_url.json")
        found = json.loads(said or "{}").get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, ValueError):
        return None
    return found[:12] if isinstance(found, str) else None
