"""Rounds of jobs that need no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_round.job import EVERY, Job
from benchmarks.gpu_round.kept import Folder
from benchmarks.gpu_round.running import Round

ABOUT: dict[str, Any] = {
    **{"commit": "abc1234", "changed": [], "checkout": ""},
    **{"gpu": "a GPU", "gpus": 1, "driver": "1.2"},
    **{"cuda": "13.0", "python": "3.12", "versions": {"torch": "2.0", "triton": None}},
    "command": "python -m benchmarks.gpu_round",
}


def job(name: str, code: str, **options: Any) -> Job:
    """A job that runs some Python."""
    seconds = options.pop("seconds", 1)
    return Job(name, "that it runs", ("python", "-c", code, "{out}"), seconds, EVERY, **options)


def made(where: Path, *jobs: Job, every: float = 10, **options: Any) -> Round:
    """A round to be run, in a new folder `out` there and an archive beside it."""
    out = where / "out"
    out.mkdir()
    folder = Folder(out, where / "out.tar", ABOUT, every=every)
    return Round(jobs, folder, **{"cores": 4, "seconds": None} | options)
