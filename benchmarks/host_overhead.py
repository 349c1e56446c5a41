"""Times what the host spends on one call, beside the same launches with their arguments ready.

    python benchmarks/host_overhead.py > benchmarks/host_overhead.csv
    python benchmarks/host_overhead.py --stages > benchmarks/host_stages.csv

Calls so small that the GPU waits for the host, on other tensors than the call before; nothing is
synchronised between them. Rows `call`:
`sagepatch.attention`; rows `layer`: a patched layer with its guard. `call_us`: the whole of it,
`backend_us`: from the backend's entry on, `launches_us`: its launches alone. With `--stages`: what
the parts of a known call take, each alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable

import torch

import sagepatch
from sagepatch import known
from sagepatch.backends import memory, prepared, unusable
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.backends.driver import launcher
from sagepatch.backends.guard import DeviceGuard
from sagepatch.dispatch import Request
from sagepatch.env import Machine
from sagepatch.functional import run as run_call
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ops import run_variant
from sagepatch.spec import Call

CALLS = 300
SETS = 4
VARIANTS = ("triton.sage2_8", "cuda.sage2pp_8_d4")
FIELDS = (
    *("toolchain", "recipe", "row", "kernels", "call_us", "backend_us", "launches_us"),
    *("beyond_us", "gpu", "driver", "torch", "triton", "command"),
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


def launches(found: prepared.Prepared, call: Call, flags: torch.Tensor) -> Callable[[], object]:
    """Every launch of a known kind of call, with the arguments of one."""
    out, room = call.empty_out(), torch.empty(found.scratch_bytes, dtype=torch.uint8, device="cuda")
    frame = found.chain.frame()
    frame.move(
        prepared.values_of(
            call,
            out=out.data_ptr(),
            scratch=room.data_ptr(),
            flags=flags.data_ptr(),
            factor=call.scale * found.factor_of_scale,
        )
    )
    frame.follow(torch.cuda.current_stream().cuda_stream)
    launch = launcher()

    def run() -> None:
        for config, function, params in frame.launches:
            launch(config, function, params, None)

    # What the launches write stays theirs as long as they may run.
    run.memory = (frame, out, room)  # type: ignore[attr-defined]
    return run


def stages(name: str, sets: list[tuple[torch.Tensor, ...]]) -> dict[str, Callable[[], object]]:
    """The parts of a known call of `sagepatch.attention`, and the whole of it."""
    variant, turn = BY_NAME[name], itertools.cycle(sets)
    q, k, v = sets[0]
    for _ in range(2):
        sagepatch.attention(q, k, v, variant=name)
    call = Call(q, k, v, 0.125)
    found = prepared.find(variant.toolchain, call, variant.recipe)
    assert found is not None
    stream = torch.cuda.current_stream().cuda_stream
    out, room = (
        torch.empty_like(q),
        torch.empty(found.scratch_bytes, dtype=torch.uint8, device="cuda"),
    )
    given = {"out": out.data_ptr(), "scratch": room.data_ptr(), "factor": 0.1}
    moved = itertools.cycle([prepared.values_of(Call(*one, 0.125), **given) for one in sets])
    frame = found.chain.frame()
    form = found.form

    def find() -> object:
        seen = known.seen_of(*next(turn), None)
        assert seen is not None
        kinds = (type(None), type(None))
        return known.recall((seen[1], False, None, None, *kinds, None, name, "BHSD", False))

    assert find() is not None
    return {
        "call": lambda: sagepatch.attention(*next(turn), variant=name),
        "find": find,
        "output": lambda: memory.empty(form.shape, form.strides, torch.bfloat16),
        "output_by_torch_empty": lambda: torch.empty(
            form.shape, dtype=torch.bfloat16, device=q.device
        ),
        "scratch": lambda: memory.give(memory.take(found.scratch_bytes, stream)),
        "scratch_by_torch_empty": lambda: torch.empty(
            found.scratch_bytes, dtype=torch.uint8, device=q.device
        ),
        "parameters": lambda: frame.move(next(moved)),
        "launches": launches(found, call, torch.zeros(2, dtype=torch.int32, device="cuda")),
    }


def write_stages(sets: list[tuple[torch.Tensor, ...]], machine: Machine) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(("toolchain", "recipe", "stage", "us", *FIELDS[8:]))
    about = (machine.gpu_name, machine.driver, machine.versions["torch"])
    for name in VARIANTS:
        variant = BY_NAME[name]
        for stage, run in stages(name, sets).items():
            row = (variant.toolchain, variant.recipe.name, stage, f"{microseconds(run):.2f}")
            command = "python benchmarks/host_overhead.py --stages"
            writer.writerow((*row, *about, machine.versions.get("triton"), command))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", action="store_true", help="the parts of a known call")
    wanted = parser.parse_args()
    machine = Machine.here()
    sets = [
        tuple(torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for _ in range(SETS)
    ]
    torch.set_grad_enabled(False)
    if wanted.stages:
        write_stages(sets, machine)
        return
    writer = csv.DictWriter(sys.stdout, FIELDS)
    writer.writeheader()
    turn = itertools.cycle(sets)
    calls = itertools.cycle([Call(*tensors, 0.125) for tensors in sets])
    for name in VARIANTS:
        variant = BY_NAME[name]
        layer = PatchedLayer("layer", "self", Policy(), Request(name), unusable)
        guard = DeviceGuard(sets[0][0].device)
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "call": (
                lambda name=name: sagepatch.attention(*next(turn), variant=name),
                lambda variant=variant: run_variant(variant, next(calls)),
            ),
            "layer": (
                lambda layer=layer: run_call(Call(*next(turn), 0.125), handle=layer.handle),
                lambda guard=guard, variant=variant: guard.run(variant, next(calls)),
            ),
        }
        for row, (whole, backend) in ways.items():
            before = set(prepared._PREPARED)
            backend()
            (key,) = set(prepared._PREPARED) - before
            served = prepared._PREPARED[key]
            launches_us = microseconds(launches(served, next(calls), guard.flags))
            call_us = microseconds(whole)
            writer.writerow(
                {
                    "toolchain": variant.toolchain,
                    "recipe": variant.recipe.name,
                    "row": row,
                    "kernels": len(served.chain.links),
                    "call_us": f"{call_us:.1f}",
                    "backend_us": f"{microseconds(backend):.1f}",
                    "launches_us": f"{launches_us:.1f}",
                    "beyond_us": f"{call_us - launches_us:.1f}",
                    "gpu": machine.gpu_name,
                    "driver": machine.driver,
                    "torch": machine.versions["torch"],
                    "triton": machine.versions.get("triton"),
                    "command": "python benchmarks/host_overhead.py",
                }
            )


if __name__ == "__main__":
    main()
