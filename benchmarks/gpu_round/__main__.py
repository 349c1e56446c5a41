"""Runs again on a GPU what a change of the kernels asks for, in a given time, into one archive; and
puts the rows of an archive into the tables.

    python -m benchmarks.gpu_round --list [NAMES]
    python -m benchmarks.gpu_round NAMES --seconds 1200 --kernels triton --out FOLDER
    python -m benchmarks.gpu_round merge ARCHIVE [NAMES]

docs/measuring.md says more.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.gpu_round import merging
from benchmarks.gpu_round.jobs import chosen, table
from benchmarks.gpu_round.kept import (
    ENDED,
    FAILED,
    INTERRUPTED,
    Folder,
    Record,
    facts,
    told_of_files,
)
from benchmarks.gpu_round.running import Round, say

TOOLCHAINS = ("triton", "cuda", "cuda_mma")


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_round", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="jobs by name or glob, in this order; else all")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--kernels", choices=TOOLCHAINS, help="only jobs about these kernels")
    parser.add_argument("--seconds", type=float, help="end after so many")
    parser.add_argument("--out", type=Path, default=Path("gpu_round"), help="a new folder")
    parser.add_argument("--archive", type=Path, help="a tar file; else beside the folder")
    parser.add_argument("--workers", type=int, default=cores(), help="cores to share out")
    parser.add_argument("--commit", help="where git is not at hand")
    parser.add_argument("--anyway", action="store_true", help="also where packages are missing")
    options = parser.parse_args(words)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: at least 1")
    return options


def told(records: list[Record]) -> int:
    """Say how it went; the exit code: 0, 1 where a job failed or was ended, 130 if interrupted."""
    names = {
        outcome: [record.job for record in records if record.outcome == outcome]
        for outcome in dict.fromkeys(record.outcome for record in records)
    }
    for outcome, jobs in names.items():
        say(f"{len(jobs)} {outcome}: {', '.join(jobs)}")
    if INTERRUPTED in names or any(r.why.startswith("interrupted") for r in records):
        return 130
    return 1 if {FAILED, ENDED} & set(names) else 0


def run(words: list[str]) -> int:
    """A round, or the list of what it would run."""
    options = parsed(words)
    try:
        jobs = chosen(options.names, options.kernels)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list or not jobs:
        print(table(jobs))
        return 0
    out = options.out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        print(f"{out} is there already; --out takes a new folder", file=sys.stderr)
        return 2
    about = facts(options.commit)
    if not about["gpus"]:
        print("there is no GPU here; --list says what would run on one", file=sys.stderr)
        return 2
    if about["commit"] == "unknown":
        print("no git here: --commit says what the rows are of", file=sys.stderr)
        return 2
    if told_differing := told_of_files(about):
        say(told_differing)
    out.mkdir(parents=True, exist_ok=True)
    archive = (options.archive or out.with_name(f"{out.name}.tar")).resolve()
    archive.parent.mkdir(parents=True, exist_ok=True)
    folder = Folder(out, archive, about)
    going = Round(
        *(jobs, folder),
        seconds=options.seconds,
        cores=options.workers,
        anyway=options.anyway,
    )
    code = told(going.run())
    say(f"{archive} has it all")
    return code


def main() -> int:
    """A round, or merging one."""
    words = sys.argv[1:]
    return merging.main(words[1:]) if words[:1] == ["merge"] else run(words)


if __name__ == "__main__":
    sys.exit(main())
