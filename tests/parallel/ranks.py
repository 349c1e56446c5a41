"""Runs one function in several processes that talk over gloo (or NCCL), and brings back what each
returned. Nobody waits for a process that died or hangs: what it wrote, or where it was, is told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# Loaded once, in the server that the processes are forked from.
PRELOADED = ["torch", "diffusers", "parallel.work"]
LONGEST_S = 240
# How long results of a process that has ended may still be on their way.
GRACE_S = 3
TOLD_CHARACTERS = 4000
# On GPUs: compiling takes longest.
NCCL: dict[str, Any] = {"backend": "nccl", "longest_s": 150}


def on_ranks(
    world: int,
    work: Callable[..., Any],
    folder: Path,
    *args: Any,
    backend: str = "gloo",
    longest_s: float = LONGEST_S,
) -> list[Any]:
    """What `work(rank, *args)` returns on each of `world` processes, in order of rank.

    `work` and its results must pickle. Raises RuntimeError with the traceback of a rank that
    failed, with the last words of one that died, and with the stacks of those that took longer than
    `longest_s` seconds.
    """
    tests = str(Path(__file__).resolve().parent.parent)
    if tests not in sys.path:
        sys.path.insert(0, tests)
    # A process that has asked CUDA anything cannot be forked: whoever is to use it starts afresh.
    context: Any = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
    if backend != "nccl":
        context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    until = time.monotonic() + longest_s
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes = [
        context.Process(
            target=_rank, args=(rank, world, backend, meeting, log, longest_s, results, work, args)
        )
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    try:
        found = _collected(processes, results, logs, until)
    except RuntimeError:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(20)
    return [found[rank] for rank in range(world)]


def _collected(
    processes: list[Any], results: Any, logs: list[Path], until: float
) -> dict[int, Any]:
    found: dict[int, Any] = {}
    failed: dict[int, str] = {}
    ended: dict[int, float] = {}  # without a result, since when
    while len(found) < len(processes):
        with contextlib.suppress(queue.Empty):
            rank, result, error = results.get(timeout=0.2)
            if error is None:
                found[rank] = pickle.loads(result)
            else:
                failed[rank] = error
        now = time.monotonic()
        for rank, process in enumerate(processes):
            if rank not in found and process.exitcode is not None:
                ended.setdefault(rank, now)
        lost = [since for rank, since in ended.items() if rank not in found]
        if (lost and now > min(lost) + GRACE_S) or now > until + GRACE_S:
            # One that fails takes others with it: all are told.
            told = [
                f"rank {rank} of {len(processes)}, exit code {process.exitcode}:\n"
                + failed.get(rank, _last_words(logs[rank]))
                for rank, process in enumerate(processes)
                if rank not in found and (rank in ended or not lost)
            ]
            raise RuntimeError("\n".join(told))
    return found


def _last_words(log: Path) -> str:
    if not log.exists():
        return "(it had not started)"
    return log.read_text(errors="replace")[-TOLD_CHARACTERS:] or "(it wrote nothing)"


def _rank(
    rank: int,
    world: int,
    backend: str,
    meeting: Path,
    log: Path,
    longest_s: float,
    results: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # Whatever C++ writes, too, and the stacks of a process that waits for ever.
    with open(log, "w", buffering=1) as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
        faulthandler.dump_traceback_later(longest_s, exit=True, file=written)
        try:
            result = _worked(rank, world, backend, meeting, longest_s, work, args)
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
    # By value: shared memory would go with this process.
    results.put((rank, pickle.dumps(result), None))


def _worked(
    rank: int,
    world: int,
    backend: str,
    meeting: Path,
    longest_s: float,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        # diffusers asks torch for the number of accelerators: 0 on a CPU, which it divides by.
        torch.accelerator.device_count = lambda: 1
    torch.distributed.init_process_group(
        backend,
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=longest_s),
    )
    result = work(rank, *args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return result
