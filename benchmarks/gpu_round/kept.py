"""What a round leaves: a record a job, a summary as JSON and CSV, and one archive of the folder."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.quality.tables import head

ROOT = Path(__file__).resolve().parents[2]
CODE = ("sagepatch", "benchmarks", "tests")
SUMMARY = "summary"
# The kernels, plans and checks that all jobs share; no part of the archive.
CACHE = "cache"
MOST_FILES = 8
# What became of a job. `ENDED`: it took too long; `LATE`: there was no time to begin it.
OK, FAILED, ENDED, SKIPPED, LATE = "ok", "failed", "ended", "skipped", "not reached"
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Record:
    """One job of a round: what became of it. Counts are pytest's, None where it said none, and the
    names of failed tests too.
    """

    job: str
    outcome: str
    why: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    passed: int | None = None
    failed: int | None = None
    errors: int | None = None
    skipped: int | None = None
    failed_tests: str = ""
    command: str = ""
    writes: dict[str, str] = field(default_factory=dict)


def facts(commit: str | None) -> dict[str, Any]:
    """What all jobs share: the commit and what was changed since, the machine, the versions.

    The GPU is asked by a process of its own, so that nothing of this one stays on it.
    """
    code = "import json; from sagepatch.env import Machine; m = Machine.here(); "
    code += "print(json.dumps({**m.to_dict(), 'gpu': m.gpu_name}))"
    asked = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path_of_children()},
        capture_output=True,
        text=True,
        check=True,
    )
    machine = json.loads(asked.stdout.splitlines()[-1])
    return {
        "commit": commit or head(),
        **differing(commit),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": machine["gpu"],
        "gpus": len(machine["gpus"]),
        **{name: machine[name] for name in ("driver", "cuda", "python", "versions")},
        "command": "python -m benchmarks.gpu_round " + " ".join(sys.argv[1:]),
    }


def path_of_children() -> str:
    """This checkout first, so that jobs run what is here."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def differing(commit: str | None, root: Path = ROOT) -> dict[str, Any]:
    """How the files of code there differ from a commit, else from the one that is checked out:
    `changed` are those that do, and `checkout` is the commit that they were compared with where git
    knows no such commit, else "". Nothing differs without git.
    """
    same = {"changed": [], "checkout": ""}
    if not (root / ".git").exists():
        return same
    known = _git(root, "rev-parse", "--verify", "--quiet", f"{commit or 'HEAD'}^{{commit}}")
    base = known or _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if not base:
        return same
    with tempfile.TemporaryDirectory() as folder:
        # The index may be of another commit than the files are: one of this commit's own.
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        _git(root, "read-tree", base[0], env=env)
        changed = _git(root, "diff", "--name-only", "--", *CODE, env=env)
        changed += _git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE, env=env)
    return {"changed": sorted(changed), "checkout": "" if known else base[0][:7]}


def _git(root: Path, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """The lines that git says, none where it fails or is not there."""
    if (git := shutil.which("git")) is None:
        return []
    asked = [git, "-C", str(root), "-c", "core.quotePath=false", *words]
    found = subprocess.run(
        asked, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    return found.stdout.splitlines() if found.returncode == 0 else []


def told_of_files(about: Mapping[str, Any]) -> str:
    """That the files were not those of the commit, "" where they were."""
    changed, commit = about["changed"], about["commit"]
    files = ", ".join(changed[:MOST_FILES])
    files += f" and {len(changed) - MOST_FILES} more" if len(changed) > MOST_FILES else ""
    if checkout := about.get("checkout"):
        differ = f"; changed since {checkout}: {files}" if changed else ""
        return f"the checkout is of {checkout}, not of {commit}, which git does not know{differ}"
    return f"not what {commit} says: {files}" if changed else ""


class Folder:
    """The folder of a round and the archive of it, which is written anew every few seconds while
    something changes, so that a round that is cut off has lost nothing.
    """

    def __init__(self, out: Path, archive: Path, about: dict[str, Any], every: float = 10) -> None:
        self.out, self.archive, self.about, self.every = out, archive, about, every
        self._kept: object = None
        self._at = float("-inf")

    def save(self, records: list[Record], *, now: bool = False) -> None:
        """Write the summary and the archive, if it is time or `now`."""
        if not now and time.monotonic() - self._at < self.every:
            return
        self._at = time.monotonic()
        document = {**self.about, "out": str(self.out), "jobs": [asdict(one) for one in records]}
        self._write(f"{SUMMARY}.json", json.dumps(document, indent=1) + "\n")
        self._write(f"{SUMMARY}.csv", self._as_csv(records))
        kept = (path for path in self.out.iterdir() if path.name != CACHE)
        files = sorted(path for top in kept for path in (top, *top.rglob("*")) if path.is_file())
        state = [(path, *_size_and_time(path)) for path in files]
        if state != self._kept:
            self._pack(files)
            self._kept = state

    def _as_csv(self, records: list[Record]) -> str:
        versions = self.about["versions"]
        shared = {
            **{name: self.about[name] for name in ("commit", "gpu", "driver", "cuda")},
            **{name: versions.get(name) for name in ("torch", "triton", "sagepatch")},
        }
        names = [f.name for f in fields(Record) if f.name not in ("command", "writes")]
        text = io.StringIO()
        writer = csv.DictWriter(text, [*names, *shared, "command"], lineterminator="\n")
        writer.writeheader()
        for record in records:
            row = asdict(record)
            del row["writes"]
            writer.writerow({**row, **shared})
        return text.getvalue()

    def _write(self, name: str, text: str) -> None:
        path = self.out / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

    def _pack(self, files: list[Path]) -> None:
        """All files as they are at this moment; the archive there was stands until it is whole."""
        half = self.archive.with_name(f"{self.archive.name}.half")
        with tarfile.open(half, "w") as tar:
            for path in files:
                try:
                    # Jobs write meanwhile: what is read once has the size that the header says.
                    data = path.read_bytes()
                    told = tarfile.TarInfo(str(path.relative_to(self.out)))
                    told.mtime = int(path.stat().st_mtime)
                except FileNotFoundError:
                    continue
                told.size = len(data)
                tar.addfile(told, io.BytesIO(data))
        half.replace(self.archive)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
