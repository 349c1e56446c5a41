"""Runs one function in several processes that talk over gloo (or NCCL), and brings back what each
returned.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# Loaded once, in the server that the processes are forked from.
PRELOADED = ["torch", "diffusers", "parallel.work"]
LONGEST_S = 240


def on_ranks(
    world: int, work: Callable[..., Any], folder: Path, *args: Any, backend: str = "gloo"
) -> list[Any]:
    """What `work(rank, *args)` returns on each of `world` processes, in order of rank.

    `work` and its results must pickle. Raises RuntimeError with the traceback of a rank that
    failed.
    """
    tests = str(Path(__file__).resolve().parent.parent)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if tests not in sys.path:
        sys.path.insert(0, tests)
    results: Any = context.Queue()
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    processes = [
        context.Process(target=_rank, args=(rank, world, backend, meeting, results, work, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world:
            rank, result, error = results.get(timeout=LONGEST_S)
            if error is not None:
                raise RuntimeError(f"rank {rank} of {world} failed:\n{error}")
            found[rank] = pickle.loads(result)
    except queue.Empty:
        raise RuntimeError(f"ranks {sorted(set(range(world)) - set(found))} did not end") from None
    finally:
        for process in processes:
            if len(found) < world:
                process.terminate()
            process.join(20)
    return [found[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    backend: str,
    meeting: Path,
    results: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        # diffusers asks torch for the number of accelerators: 0 on a CPU, which it divides by.
        torch.accelerator.device_count = lambda: 1
    try:
        torch.distributed.init_process_group(
            backend,
            init_method=meeting.as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=LONGEST_S),
        )
        result = work(rank, *args)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    # By value: shared memory would go with this process.
    results.put((rank, pickle.dumps(result), None))
