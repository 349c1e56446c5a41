"""One job of a round, and the sets of kernels that jobs are about."""

from __future__ import annotations

from dataclasses import dataclass

TRITON, CUDA, MMA = frozenset({"triton"}), frozenset({"cuda"}), frozenset({"cuda_mma"})
HOPPER, EVERY = TRITON | CUDA, TRITON | CUDA | MMA
# Seconds of one test. Only a thread ends what waits for the GPU: it takes the process with it, and
# pytest-xdist names the test and starts another process.
TEST_SECONDS = 120
# One "v" is pyproject.toml's "q", the other a line a test: a log that is cut off has names.
PYTEST = (
    *("python", "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "--tb=short", "-rfE", "-vv"),
    *(f"--timeout={TEST_SECONDS}", "--timeout-method=thread"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One command. In `command`, {out} stands for the job's own folder, {plans} for one that all
    jobs share, {commit} for the commit and {workers} for the cores that the job is given.

    `seconds` is what it usually takes on an H200, its tests beside others'; `guessed` where nobody
    has timed it. `workers` are the cores it can use, for pytest its processes. Nothing else runs
    beside a `quiet` job. `writes` are files in its folder, each with the table under benchmarks/
    that takes its rows, or "" where it is kept in the archive alone; `rows` is the least that each
    file must have. `stdout` is the file that takes what it prints. `needs` are packages or
    programs. A `cold` job finds no compiled kernels of other jobs.
    """

    name: str
    proves: str
    command: tuple[str, ...]
    seconds: float
    kernels: frozenset[str]
    guessed: bool = True
    gpus: int = 1
    quiet: bool = False
    workers: int = 1
    writes: tuple[tuple[str, str], ...] = ()
    rows: int = 1
    stdout: str = ""
    needs: tuple[str, ...] = ()
    cold: bool = False

    @property
    def is_pytest(self) -> bool:
        return self.command[: len(PYTEST)] == PYTEST


def of_tests(
    name: str,
    proves: str,
    seconds: float,
    workers: int,
    kernels: frozenset[str],
    *files: str,
    gpus: int = 1,
    quiet: bool = False,
    guessed: bool = False,
) -> Job:
    """Files of tests, the slow ones too."""
    command = (*PYTEST, *(f"tests/{file}" for file in files))
    return Job(
        *(name, proves, command, seconds, kernels),
        guessed=guessed,
        gpus=gpus,
        quiet=quiet,
        workers=workers,
        needs=("pytest", "pytest-timeout"),
    )
