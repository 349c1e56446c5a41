"""How long the pre-pass of the CUDA kernels takes, next to the bytes that it must move.

    python benchmarks/cuda_prepass.py > benchmarks/cuda_prepass.csv

Each time is the median of rounds of 20 calls in one CUDA graph. `cold`: inputs and results take
turns, more of them than the L2 holds; `warm`: every call has the same. `floor_us`: all bytes at the
copy rate that this run measured, each read or written once.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from sagepatch.backends.cuda.prepass import PrepassPlan, form_of, plan_of, prepare
from sagepatch.env import Machine
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

# Name, (B, Hq, Hkv, S, D).
SHAPES = (
    ("flux_1024", (1, 24, 24, 4608, 128)),
    ("cogvideox_2b", (2, 30, 30, 17776, 64)),
    ("d128_16k", (1, 16, 16, 16384, 128)),
    ("d128_1k", (1, 24, 24, 1024, 128)),
    ("llama_8k", (1, 32, 8, 8192, 128)),
)
RECIPE_NAMES = ("sage2_8", "sage1_b")
CALLS, ROUNDS = 20, 5
FIELDS = (
    *("shape", "recipe", "lse", "cold_us", "warm_us", "queries_us", "floor_us"),
    *("megabytes", "copy_tb_s", "gpu", "driver", "torch", "command"),
)


def per_call_us(call: Callable[[int], None]) -> float:
    """Microseconds of one of `CALLS` calls in a graph; `call` is given its number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1000 / CALLS)
    return statistics.median(found)


def inputs(shape: Sequence[int], count: int, lse: bool) -> list[Call]:
    B, Hq, Hkv, S, D = shape
    made = []
    for _ in range(count):
        q, k, v = (
            torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for H in (Hq, Hkv, Hkv)
        )
        made.append(Call(q, k, v, D**-0.5, return_lse=lse))
    return made


def measure(shape: Sequence[int], recipe_name: str, lse: bool) -> dict[str, float]:
    """Times of one shape, in microseconds, and the bytes behind them."""
    recipe = RECIPES[recipe_name]
    elements = shape[0] * shape[3] * shape[4] * (shape[1] + 2 * shape[2])
    sets = max(2, min(8, -(-400_000_000 // (2 * elements))))
    calls = inputs(shape, sets, lse)
    plan: PrepassPlan = plan_of(form_of(calls[0], recipe))
    room = [torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda") for _ in range(sets)]

    def both(number: int) -> None:
        plan.launch(calls[number % sets], room[number % sets].data_ptr())

    def same(number: int) -> None:
        plan.launch(calls[0], room[0].data_ptr())

    def queries(number: int) -> None:
        of = calls[number % sets]
        given = (of.q.data_ptr(), of.k.data_ptr(), of.v.data_ptr(), 0, 0, 0, of.scale)
        fill = plan.queries_fill(given, room[number % sets].data_ptr())
        plan.kernels[0](0, plan.queries_blocks, *fill)

    rows = shape[0] * shape[3] * shape[4]
    q, kv = rows * shape[1], rows * shape[2]
    written = q + kv + kv * (2 if recipe.pv == "fp16" else 1)
    moved = 2 * (q + 2 * kv) + written
    return {
        "cold_us": per_call_us(both),
        "warm_us": per_call_us(same),
        "queries_us": per_call_us(queries),
        "megabytes": moved / 1e6,
    }


def copy_rate() -> float:
    """Bytes read and written a second by a large copy, in TB/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        target.copy_(source)

    return 2 * source.numel() / per_call_us(copy) / 1e6


def host_us() -> dict[str, float]:
    """What one small pre-pass costs the host, as tensors and by its plan alone."""
    (call,) = inputs((1, 2, 2, 128, 64), 1, False)
    recipe = RECIPES["sage2_8"]
    plan = plan_of(form_of(call, recipe))
    room = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device="cuda")
    found = {}
    for name, run in (
        ("prepare", lambda: prepare(call, recipe)),
        ("form and plan", lambda: plan_of(form_of(call, recipe))),
        ("launch", lambda: plan.launch(call, room.data_ptr())),
    ):
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            run()
        found[name] = (time.perf_counter() - start) / 300 * 1e6
        torch.cuda.synchronize()
    return found


def main() -> None:
    machine = Machine.here()
    rate = copy_rate()
    common = {
        "copy_tb_s": f"{rate:.2f}",
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "torch": machine.versions["torch"],
        "command": "python benchmarks/cuda_prepass.py",
    }
    writer = csv.DictWriter(sys.stdout, FIELDS)
    writer.writeheader()
    for name, shape in SHAPES:
        for recipe in RECIPE_NAMES:
            for lse in (False, True):
                row = measure(shape, recipe, lse)
                numbers = {key: f"{value:.1f}" for key, value in row.items()}
                floor = row["megabytes"] / rate
                writer.writerow(
                    {"shape": name, "recipe": recipe, "lse": lse, "floor_us": f"{floor:.1f}"}
                    | numbers
                    | common
                )
    print("host us", {k: round(v, 1) for k, v in host_us().items()}, file=sys.stderr)


if __name__ == "__main__":
    main()
