"""Tables of results on disk: each row with the command, machine, versions and commit it is from."""

from __future__ import annotations

import csv
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sagepatch.env import Machine

HERE = Path(__file__).parent

Row = Mapping[str, object]


def command_of(module: str, words: Sequence[str]) -> str:
    """The command that made a table, without where it wrote and what it was told of the commit.

    >>> command_of("demo", ["--captions", "4", "--out", "/tmp/x"])
    'python -m benchmarks.quality.demo --captions 4'
    """
    kept = list(words)
    for option in ("--out", "--commit", "--keep"):
        while option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return f"python -m benchmarks.quality.{module} {shlex.join(kept)}".strip()


def provenance(command: str, commit: str | None = None) -> dict[str, str]:
    """The columns that every table ends with. `commit` where git is not at hand."""
    machine = Machine.here()
    versions = {**machine.versions, "cuda": machine.cuda, "driver": machine.driver}
    listed = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    device = machine.gpu_name if machine.gpus else f"CPU ({machine.system})"
    return {
        "device": device,
        "versions": listed,
        "commit": commit or head(),
        "command": command,
    }


def head() -> str:
    """The commit that is checked out, "unknown" outside a git checkout."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    asked = [git, "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(path: Path, rows: Sequence[Row], about: Mapping[str, str]) -> None:
    """Write rows of one set of columns, `about` behind each."""
    if not rows:
        raise ValueError(f"no rows for {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
