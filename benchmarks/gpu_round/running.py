"""Runs jobs in order: quiet ones alone, the others side by side as far as the cores go, none that
does not fit into the time that is left.
"""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FrameType

from benchmarks.gpu_round.job import TEST_SECONDS, Job
from benchmarks.gpu_round.kept import (
    CACHE,
    ENDED,
    FAILED,
    INTERRUPTED,
    LATE,
    OK,
    ROOT,
    SKIPPED,
    Folder,
    Record,
    path_of_children,
)
from benchmarks.gpu_round.processes import GRACE, Started
from benchmarks.gpu_round.pytest_log import counts, failed_tests, progress, unfinished_tests

# What a round keeps of its seconds to end what runs and to write the archive.
RESERVE = GRACE + 2.0
# A job that takes so many times what it usually does, and a minute, hangs. Tests that hang, so many
# one after the other, are named before.
TIMES, MORE = 3.0, 60.0
TESTS_IN_A_ROW = 2
LOG, PLANS = "log.txt", "plans"
STOPS = (signal.SIGINT, signal.SIGTERM)
PULSE = 0.1


@dataclass(slots=True)
class Running:
    """A job and its processes; at `until` it is ended."""

    job: Job
    started: Started
    record: Record
    workers: int
    until: float


def is_there(need: str) -> bool:
    """Whether a package is installed, or a program on the path."""
    try:
        distribution(need)
    except PackageNotFoundError:
        return shutil.which(need) is not None
    return True


def refusal(job: Job, gpus: int, *, anyway: bool = False) -> str:
    """Why a job cannot run here, "" where it can; `anyway` overlooks what is missing."""
    if job.gpus > gpus:
        return f"needs {job.gpus} GPUs, found {gpus}"
    missing = [need for need in job.needs if not is_there(need)]
    return f"missing: {', '.join(missing)}" if missing and not anyway else ""


def command_of(job: Job, out: Path, commit: str, workers: int) -> list[str]:
    """The words that run a job, its folder and the like put in; pytest gets its processes."""
    values = {
        "{out}": str(out / job.name),
        "{plans}": str(out / PLANS),
        "{commit}": commit,
        "{workers}": str(workers),
    }
    words = [sys.executable, *job.command[1:]]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    # One process too: where it dies of a test, the others are still run.
    if job.is_pytest and is_there("pytest-xdist"):
        words += ["-n", str(workers)]
    return words


def environment_of(job: Job, out: Path) -> dict[str, str]:
    """What its processes get: this checkout, and a folder of compiled kernels for all jobs, or for
    a `cold` one its own.
    """
    cache = out / CACHE / job.name if job.cold else out / CACHE
    return {
        **os.environ,
        "PYTHONPATH": path_of_children(),
        "SAGEPATCH_CACHE_DIR": str(cache),
        "SAGEPATCH_TEST_KERNELS": str(cache / "kernels"),
    }


def patience(job: Job) -> float:
    """Seconds after which a job hangs."""
    most = max(TIMES * job.seconds, job.seconds + MORE)
    return most + TESTS_IN_A_ROW * TEST_SECONDS * job.is_pytest


class Round:
    """Jobs, the folder that they write to, and the seconds that it may take, None for no end."""

    def __init__(
        self,
        jobs: Sequence[Job],
        folder: Folder,
        *,
        seconds: float | None,
        cores: int,
        anyway: bool = False,
    ) -> None:
        self.folder, self.cores = folder, cores
        self.over_at = float("inf") if seconds is None else time.monotonic() + seconds - RESERVE
        self.stopped = False
        self.running: list[Running] = []
        self.records: list[Record] = []
        self.waiting: list[Job] = []
        for job in jobs:
            why = refusal(job, folder.about["gpus"], anyway=anyway)
            if why:
                self._add(job, SKIPPED, why)
            else:
                self.waiting.append(job)

    def run(self) -> list[Record]:
        """All jobs; what had run stays when it is interrupted, by Ctrl-C or by SIGTERM."""
        # Nothing is raised: a job must not be lost between its start and its record.
        before = {number: signal.signal(number, self._stop) for number in STOPS}
        try:
            while (self.waiting or self.running) and not self.stopped:
                self._begin()
                self._collect()
                self.folder.save(self.records)
                time.sleep(PULSE)
        finally:
            for one in self.running:
                self._end(one, INTERRUPTED, "by Ctrl-C or SIGTERM")
            self.running = []
            for job in self.waiting:
                self._add(job, LATE, "interrupted before")
            self.folder.save(self.records, now=True)
            for number, heard in before.items():
                signal.signal(number, heard)
        return self.records

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _begin(self) -> None:
        """Start jobs, the first one first, until one has to wait."""
        while self.waiting and not self.stopped:
            job = self.waiting[0]
            left = self.over_at - time.monotonic()
            if job.seconds > left:
                self.waiting.pop(0)
                self._add(job, LATE, f"needs {job.seconds:.0f} s, {max(left, 0):.0f} s are left")
                continue
            workers = min(job.workers, self.cores)
            free = self.cores - sum(one.workers for one in self.running)
            alone = job.quiet or any(one.job.quiet for one in self.running)
            if self.running and (alone or workers > free):
                return
            self.waiting.pop(0)
            self._start(job, workers)

    def _start(self, job: Job, workers: int) -> None:
        out = self.folder.out
        mine = out / job.name
        mine.mkdir()
        (out / CACHE).mkdir(mode=0o700, exist_ok=True)
        words = command_of(job, out, self.folder.about["commit"], workers)
        shown = shlex.join(["python", *words[1:]])
        record = Record(job.name, OK, command=shown, writes=dict(job.writes))
        say(f"{job.name} begins: {shown}")
        started = Started(
            words,
            cwd=ROOT,
            env=environment_of(job, out),
            log=mine / LOG,
            stdout=mine / job.stdout if job.stdout else None,
        )
        until = min(started.began + patience(job), self.over_at)
        self.running.append(Running(job, started, record, workers, until))

    def _collect(self) -> None:
        """Record what has ended, and end what takes too long."""
        for one in list(self.running):
            code = one.started.exit_code()
            if code is not None:
                self.running.remove(one)
                self._judge(one, code)
            elif time.monotonic() > one.until:
                self.running.remove(one)
                why = "the round's time was over" if one.until == self.over_at else "it hung"
                self._end(one, ENDED, f"{why}; usually {one.job.seconds:.0f} s")

    def _end(self, one: Running, outcome: str, why: str) -> None:
        code = one.started.end()
        said = self._note(one, code)
        running = unfinished_tests(said) if one.job.is_pytest else ""
        self._tell(one.record, outcome, f"{why}; in {running}" if running else why)

    def _judge(self, one: Running, code: int) -> None:
        """What became of a job that has ended by itself."""
        self._note(one, code)
        record, lacking = one.record, self._lacking(one.job)
        if code:
            self._tell(record, FAILED, f"exit code {code}")
        elif one.job.is_pytest and (record.failed or record.errors):
            self._tell(record, FAILED, "a process of the tests died")
        elif one.job.is_pytest and not record.passed:
            self._tell(record, SKIPPED, "no test ran")
        elif lacking:
            self._tell(record, FAILED, f"too few rows in {', '.join(lacking)}")
        else:
            self._tell(record, OK, "")

    def _note(self, one: Running, code: int) -> str:
        """Take into the record what a job's log says; the log."""
        one.record.exit_code, one.record.seconds = code, round(one.started.seconds, 1)
        log = self.folder.out / one.job.name / LOG
        said = log.read_text(encoding="utf-8", errors="replace")
        found = counts(said) or (progress(said) if one.job.is_pytest else {})
        for name, number in found.items():
            setattr(one.record, name, number)
        if one.job.is_pytest:
            one.record.failed_tests = failed_tests(said)
        return said

    def _lacking(self, job: Job) -> list[str]:
        """Files that a job should have written, without the rows that it should have."""
        return [
            file
            for file, _ in job.writes
            if rows_of(self.folder.out / job.name / file) < (job.rows if ".csv" in file else 1)
        ]

    def _add(self, job: Job, outcome: str, why: str) -> None:
        self._tell(Record(job.name, outcome), outcome, why)

    def _tell(self, record: Record, outcome: str, why: str) -> None:
        record.outcome, record.why = outcome, why
        self.records.append(record)
        tests = f", {record.passed} passed" if record.passed is not None else ""
        tests += f", {record.failed} failed" if record.failed else ""
        tests += f": {record.failed_tests}" if record.failed_tests else ""
        say(f"{record.job}: {outcome}{f' ({why})' * bool(why)}, {record.seconds:.0f} s{tests}")


def rows_of(path: Path) -> int:
    """How many rows a CSV file has; 1 for another file that is not empty, 0 where there is none."""
    if not path.exists() or not path.stat().st_size:
        return 0
    if path.suffix != ".csv":
        return 1
    with path.open(newline="", encoding="utf-8") as file:
        return sum(1 for _ in csv.DictReader(file))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
