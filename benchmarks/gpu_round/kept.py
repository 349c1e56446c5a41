"""What a round leaves: a record a job, a summary as JSON and CSV, and one archive of the folder."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.quality.tables import head

ROOT = Path(__file__).resolve().parents[2]
CODE = ("sagepatch", "benchmarks", "tests")
SUMMARY = "summary"
COUNTED = ("passed", "failed", "errors", "skipped")
# What became of a job. `ENDED`: it took too long; `LATE`: there was no time to begin it.
OK, FAILED, ENDED, SKIPPED, LATE = "ok", "failed", "ended", "skipped", "not reached"
INTERRUPTED = "interrupted"
# pytest's last line: "3 passed, 1 skipped in 2.13s", with or without a rule of "=" around it.
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s\b", re.MULTILINE)


@dataclass(slots=True)
class Record:
    """One job of a round: what became of it. Counts are pytest's, None where it said none."""

    job: str
    outcome: str
    why: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    passed: int | None = None
    failed: int | None = None
    errors: int | None = None
    skipped: int | None = None
    command: str = ""
    writes: dict[str, str] = field(default_factory=dict)


def counts(said: str) -> dict[str, int]:
    """How many tests passed, failed, were in error and skipped, from pytest's closing line; empty
    where there is none.

    >>> counts("...\\n2 failed, 3 passed, 1 skipped in 0.51s\\n")
    {'passed': 3, 'failed': 2, 'errors': 0, 'skipped': 1}
    """
    lines = CLOSING.findall(said)
    if not lines:
        return {}
    found = dict.fromkeys(COUNTED, 0)
    for number, what in re.findall(r"(\d+) ([a-z]+)", lines[-1]):
        name = "errors" if what == "error" else what
        if name in found:
            found[name] = int(number)
    return found


def progress(said: str) -> dict[str, int]:
    """The same from pytest's lines of one letter a test, where it was killed before it closed.

    >>> progress("..F.s [ 50%]\n.E")
    {'passed': 4, 'failed': 1, 'errors': 1, 'skipped': 1}
    """
    letters = "".join(re.findall(r"^([.FEsxX]+)(?: *\[ *\d+%\])?$", said, re.MULTILINE))
    return {name: letters.count(letter) for name, letter in zip(COUNTED, ".FEs", strict=True)}


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
        "changed": changed(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": machine["gpu"],
        "gpus": len(machine["gpus"]),
        **{name: machine[name] for name in ("driver", "cuda", "python", "versions")},
        "command": "python -m benchmarks.gpu_round " + " ".join(sys.argv[1:]),
    }


def path_of_children() -> str:
    """This checkout first, so that jobs run what is here."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def changed() -> list[str]:
    """Files of code that differ from the commit; empty without git."""
    if not (ROOT / ".git").exists():
        return []
    asked = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *CODE]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return [line[3:] for line in found.stdout.splitlines()]


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
        files = sorted(path for path in self.out.rglob("*") if path.is_file())
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
