"""The table of jobs in the order in which they run, and a choice from it."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.gpu_round.job import Job
from benchmarks.gpu_round.proofs import CHECKS, TESTS
from benchmarks.gpu_round.timings import DRAWINGS, MODELS, TIMES

# What may share the machine stands together.
JOBS = (*TESTS, *CHECKS, *DRAWINGS, *TIMES, *MODELS)


def chosen(words: Sequence[str], kernels: str | None = None) -> list[Job]:
    """The jobs that any of the names or globs means, in the order of these, each once; without
    words all of them. With `kernels` only those that are about this toolchain.

    Raises `ValueError` where a word means none.
    """
    found: dict[str, Job] = {}
    for word in words or ["*"]:
        meant = {job.name: job for job in JOBS if fnmatchcase(job.name, word)}
        if not meant:
            raise ValueError(f"no job is named {word}; --list names them")
        found.update({name: job for name, job in meant.items() if name not in found})
    return [job for job in found.values() if kernels is None or kernels in job.kernels]


def table(jobs: Sequence[Job]) -> str:
    """The jobs as lines of text."""
    width = max((len(job.name) for job in jobs), default=0)
    lines = [
        f"{job.name:{width}}  {'~' if job.guessed else ' '}{job.seconds:4.0f} s  "
        f"{job.gpus} GPU{'s' * (job.gpus > 1):1}  {_beside(job):8}  {job.proves}"
        + (f" (needs {', '.join(job.needs)})" if job.needs and not job.is_pytest else "")
        for job in jobs
    ]
    seconds = sum(job.seconds for job in jobs)
    lines.append(f"{len(jobs)} jobs, {seconds:.0f} s one after the other; ~ is a guess")
    return "\n".join(lines)


def _beside(job: Job) -> str:
    return "alone" if job.quiet else f"{job.workers} core{'s' * (job.workers > 1)}"
