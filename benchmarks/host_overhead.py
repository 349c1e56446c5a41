"""Times what the host spends on one call, beside the same launches with their arguments ready.

    python benchmarks/host_overhead.py > benchmarks/host_overhead.csv

A call so small that the GPU waits for the host; nothing is synchronised between calls. `call_us`:
`sagepatch.attention`; `backend_us`: the backend's part of it; `launches_us`: its launches alone.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import sagepatch
from sagepatch.backends.cuda import attention as cuda_attention
from sagepatch.backends.cuda.launch import Kernel
from sagepatch.backends.triton import attention as triton_attention
from sagepatch.env import Machine
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

CALLS = 300
RECIPE_NAMES = {"triton": "sage2_8", "cuda": "sage2pp_8_d4"}
FIELDS = (
    *("toolchain", "recipe", "call_us", "backend_us", "launches_us", "beyond_us"),
    *("gpu", "driver", "torch", "triton", "command"),
)


def microseconds(run: Callable[[], object]) -> float:
    """Host time of one call, the best of five rounds: without what else the machine did."""
    for _ in range(20):
        run()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
    return best / CALLS * 1e6


def triton_launches(call: Call, recipe: Recipe) -> list[Callable[[], object]]:
    """Every launch of a call of the Triton backend, with the arguments that it had."""
    triton_attention.run(call, recipe)
    (replay,) = [r for r in triton_attention._REPLAYS.values() if r is not None]
    room = torch.empty(replay.scratch_bytes, dtype=torch.uint8, device="cuda")
    out = call.empty_out()
    given = {"q": call.q, "k": call.k, "v": call.v, "out": out}
    found: list[Callable[[], object]] = []
    for runner, template, slots in replay.steps:
        args = list(template)
        for position, source in slots:
            if isinstance(source, str):
                args[position] = given[source]
            elif args[position] is None:
                args[position] = room.data_ptr() + source
            else:
                moved = args[position]
                moved.base = room[source:].view(moved.base.dtype)
        found.append(lambda runner=runner, args=tuple(args): runner(*args))
    return found


def cuda_launches(call: Call, recipe: Recipe) -> list[Callable[[], object]]:
    """Every launch of a call of the CUDA backend, with the arguments that it had."""
    made: list[tuple[Kernel, tuple[Any, ...]]] = []
    launch = Kernel.__call__

    def record(kernel: Kernel, *args: Any) -> None:
        made.append((kernel, args))
        launch(kernel, *args)

    Kernel.__call__ = record  # type: ignore[assignment, method-assign]
    try:
        cuda_attention.run(call, recipe)
    finally:
        Kernel.__call__ = launch  # type: ignore[method-assign]
    torch.cuda.synchronize()
    return [lambda kernel=kernel, args=args: kernel(*args) for kernel, args in made]


def main() -> None:
    machine = Machine.here()
    writer = csv.DictWriter(sys.stdout, FIELDS)
    writer.writeheader()
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = Call(q, k, v, 0.125)
    for toolchain, name in RECIPE_NAMES.items():
        recipe = RECIPES[name]
        backend, launches = {
            "triton": (triton_attention.run, triton_launches),
            "cuda": (cuda_attention.run, cuda_launches),
        }[toolchain]
        variant = f"{toolchain}.{name}"
        with torch.no_grad():
            sagepatch.attention(q, k, v, variant=variant)
            alone = sum(microseconds(run) for run in launches(call, recipe))
            whole = microseconds(lambda v_=variant: sagepatch.attention(q, k, v, variant=v_))
            inside = microseconds(lambda b=backend, r=recipe: b(call, r))
        writer.writerow(
            {
                "toolchain": toolchain,
                "recipe": name,
                "call_us": f"{whole:.1f}",
                "backend_us": f"{inside:.1f}",
                "launches_us": f"{alone:.1f}",
                "beyond_us": f"{whole - alone:.1f}",
                "gpu": machine.gpu_name,
                "driver": machine.driver,
                "torch": machine.versions["torch"],
                "triton": machine.versions.get("triton"),
                "command": "python benchmarks/host_overhead.py",
            }
        )


if __name__ == "__main__":
    main()
