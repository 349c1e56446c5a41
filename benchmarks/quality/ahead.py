"""Compiles kernels before they are wanted: a benchmark started again in processes that go through a
share of its conditions each, on made-up inputs, while the GPU does something else. Triton and our
checks keep their results on disk, where the benchmark then finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence

from benchmarks.quality.conditions import FAILURES

PROCESSES = 14
# `start` gives it to what it starts: "number of processes", from 0.
SHARE = "SAGEPATCH_BENCHMARK_SHARE"


def share_cache() -> None:
    """Let Triton keep what it compiles where all these processes look: torch.compile moves it in
    processes that it ran in.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/triton-{os.getuid()}")


def start(module: str, words: Sequence[str] = ()) -> list[subprocess.Popen[bytes]]:
    """Start `module` in `PROCESSES` processes, which are to go through `mine` of their work."""
    command = [sys.executable, "-m", module, *words]
    # Compiling wants a core each, not the threads of torch.
    shared = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(command, env={**shared, SHARE: f"{number} {PROCESSES}"})
        for number in range(PROCESSES)
    ]


def is_rehearsal() -> bool:
    """Whether this process was started by `start`."""
    return SHARE in os.environ


def rehearse(work: Sequence[tuple[str, Callable[[], object]]]) -> None:
    """Do this process's share of some named work; what fails is told and passed over."""
    number, of = map(int, os.environ[SHARE].split())
    began = time.perf_counter()
    for name, run in work[number::of]:
        try:
            run()
        except FAILURES:
            traceback.print_exc()
            print(f"ahead {number}: {name} failed", flush=True)
    print(f"ahead {number}: {time.perf_counter() - began:.1f} s", flush=True)
