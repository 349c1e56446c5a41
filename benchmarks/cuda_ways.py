"""Times whole calls of other ways to run INT8 attention with 16-bit P and V on a Hopper GPU beside
cuDNN's, in random order in one run, and what they consist of; writes a CSV.

    python benchmarks/cuda_ways.py benchmarks/h200_cuda_ways.csv --commit abc1234

A way is timed only after its result agreed with exact attention. `call` is the whole call,
`prepass` and `attention` its parts alone; clocks are what nvidia-smi saw under a way back to back.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.cuda_tiles import tile_served
from benchmarks.h200_attention import SHAPES, Shape, errors, make, sdpa, shell
from sagepatch.backends import prepared
from sagepatch.backends.chain import Chain
from sagepatch.backends.cuda import attention, attention_tiles, prepass
from sagepatch.backends.cuda.attention_tiles import Options, Tile
from sagepatch.backends.cuda.cache import kept
from sagepatch.backends.cuda.prepass_form import form_of
from sagepatch.backends.cuda.raw_operands import raw_strides, raw_value_strides
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

WANTED = ("d128_4k", "flux_1024", "d64_16k", "llama_8k_causal", "d128_16k", "d64_8k_causal")
# Ways under which clock and power are read, on the first two shapes.
WATCHED = ("bf16", "serves", "lag 8")
# A way that is farther from exact attention is wrong, and is not timed.
LEAST_COSINE = 0.99
COLUMNS = (
    *("shape", "recipe", "way", "part", "ms_median", "ms_p20", "ms_p80", "tflops", "cos", "rel_l1"),
    *("clock_mhz", "power_w", "gpu", "driver", "torch", "nvrtc", "commit", "command"),
)


@dataclass(frozen=True)
class Way:
    """A recipe by a tile; `copies`: V is copied by the pre-pass, `shared`: last blocks are dealt
    out whatever the table says; `bytes_ahead` of K between the statistics of a head and its codes.
    """

    recipe: str
    name: str
    tile: Tile
    copies: bool = False
    shared: bool | None = None
    bytes_ahead: int = prepass.BYTES_AHEAD


def ways(dim: int) -> list[Way]:
    """What serves a head size, and others."""
    found = []
    for name in ("sage2pp_8_d4", "sage1_b_f32", "sage2_8_bf16"):
        found.append(Way(name, "serves", attention_tiles.pick(RECIPES[name], dim, dim)))
    for name in ("sage1_b_f32", "sage2_8_bf16"):
        tile = attention_tiles.pick(RECIPES[name], dim, dim)
        found.append(Way(name, "lag 0", replace(tile, lag=0, cap=0)))
    found.append(Way(name, "lag 8", replace(tile, cap=0)))
    if dim <= 64:
        small = attention_tiles.pick(RECIPES["sage1_b_f32"], dim, dim)
        return [
            *found,
            Way("sage1_b_f32", "lag 8", replace(small, lag=8)),
            Way(name, "scales of K not ahead", replace(tile, ahead=False)),
        ]
    fast = attention_tiles.pick(RECIPES["sage2pp_8_d4"], dim, dim)
    return [
        *found,
        Way(name, "shared from 8 %", replace(tile, shares=0.08)),
        Way("sage2pp_8_d4", "shared from 2 %", replace(fast, shares=0.02)),
        Way(name, "V copied", tile, copies=True),
    ]


@dataclass
class Ready:
    """A way ready to run: whole call and parts alone."""

    call: Callable[[], Tensor]
    prepass: Callable[[], None]
    attention: Callable[[], None]


def ready(call: Call, way: Way) -> Ready:
    """Compile and keep what a way launches."""
    recipe = RECIPES[way.recipe]
    with ExitStack() as held:
        held.enter_context(tile_served(way.tile))
        if way.copies:
            held.enter_context(patch.object(attention, "raw_value_strides", lambda *facts: None))
        if way.shared is not None:
            held.enter_context(patch.object(attention, "splits", lambda *facts: way.shared))
        held.enter_context(patch.object(prepass, "BYTES_AHEAD", way.bytes_ahead))
        prepass.plan_of.cache_clear()
        attention.launch_of.cache_clear()
        _, _, made = attention._begin(call, recipe, None)
        raw_q = raw_strides(call, recipe)
        raw_v = None if way.copies else raw_value_strides(call, recipe)
        plan = prepass.plan_of(
            form_of(call, recipe, raw_q=raw_q is not None, raw_v=raw_v is not None)
        )
        launch = attention.launch_of(
            attention.Shape.of(call, recipe, call.empty_out(), raw_q, raw_v)
        )
    attention.launch_of.cache_clear()
    assert made is not None
    operands = attention.Operands.in_scratch(plan)
    alone = Chain(launch.links(operands, plan.scratch_bytes), prepared.VALUES)
    scratch = torch.empty(made.scratch_bytes, dtype=torch.uint8, device="cuda")
    out = call.empty_out()
    values = prepared.values_of(
        call, out=out.data_ptr(), scratch=scratch.data_ptr(), factor=call.scale * attention.LOG2E
    )
    before = partial(plan.launch, call, scratch.data_ptr())
    before()

    stream = torch.cuda.current_stream().cuda_stream

    def run_alone() -> None:
        alone(0, stream, values)

    keep = (scratch, out)
    run_alone.keep = keep  # type: ignore[attr-defined]
    at = prepared.addresses_of(call)
    return Ready(lambda: prepared.again(made, at, call.scale)[0], before, run_alone)


def compile_all(shapes: list[Shape]) -> None:
    """On all cores; the cache keeps them."""
    programs = set()
    wanted = [(dim, way) for dim in {shape.dim for shape in shapes} for way in ways(dim)]
    for dim, way in wanted:
        recipe = RECIPES[way.recipe]
        raw_q = torch.bfloat16 if recipe.q_granularity == "token" else None
        for causal, split in ((False, False), (False, True), (True, False)):
            if split and not way.tile.shares:
                continue
            options = Options(
                causal=causal,
                split=split,
                raw_q=raw_q,
                raw_v=recipe.pv == "bf16" and not way.copies,
            )
            with tile_served(way.tile):
                programs.add(attention_tiles.instance(recipe, dim, dim, options).program)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(kept, programs))
    print(f"{len(programs)} programs compiled", flush=True)


def under_load(run: Callable[[], object], seconds: float) -> tuple[str, str]:
    """Median clock and power while `run` goes on and on."""
    query = "--query-gpu=clocks.sm,power.draw"
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    watch = subprocess.Popen(
        ["nvidia-smi", "-i", device, query, "--format=csv,noheader,nounits", "-lms", "50"],
        stdout=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            run()
        torch.cuda.synchronize()
    watch.terminate()
    said = watch.communicate()[0].splitlines()
    rows = [tuple(map(float, line.split(","))) for line in said if line.count(",") == 1]
    rows = rows[len(rows) // 2 :]
    if not rows:
        return "", ""
    return tuple(f"{sorted(column)[len(column) // 2]:.0f}" for column in zip(*rows, strict=True))  # type: ignore[return-value]


def timed(run: Callable[[], object], ms: int) -> list[float]:
    return list(triton.testing.do_bench(run, warmup=5, rep=ms, return_mode="all"))


def quantiles(times: list[float]) -> list[float]:
    return torch.quantile(torch.tensor(times), torch.tensor([0.5, 0.2, 0.8])).tolist()


Key = tuple[str, str]  # recipe and way


def run_of(call: Call, one: Ready | None) -> Callable[[], Tensor]:
    """A whole call by a way, or by cuDNN."""
    return partial(sdpa, SDPBackend.CUDNN_ATTENTION, call) if one is None else one.call


def agreeing(call: Call, runs: dict[Key, Ready | None]) -> dict[Key, tuple[float, float]]:
    """Cosine and relative L1 of each way against exact attention."""
    outs = {"|".join(key): run_of(call, one)() for key, one in runs.items()}
    found = errors(call, outs)
    return {key: found["|".join(key)] for key in runs}


def taken(
    call: Call, runs: dict[Key, Ready | None], found: dict[Key, tuple[float, float]], args: Any
) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds of whole calls in random order, and of the parts alone, by recipe, way and part;
    of those that agree with exact attention.
    """
    times: dict[tuple[str, str, str], list[float]] = {}
    order = list(runs)
    for turn in range(args.rounds):
        random.Random(turn).shuffle(order)
        for key in order:
            if found[key][0] < LEAST_COSINE:
                continue
            one = runs[key]
            times.setdefault((*key, "call"), []).extend(timed(run_of(call, one), args.ms))
            if one is not None and turn == 0:
                times[*key, "attention"] = timed(one.attention, args.ms // 2)
                times[*key, "prepass"] = timed(one.prepass, 10)
    return times


def measure(shape: Shape, args: Any) -> Iterator[tuple[str, ...]]:
    """The rows of a shape, without the facts of the machine; says what it finds."""
    call = make(shape)
    runs: dict[Key, Ready | None] = {("cudnn", "bf16"): None}
    runs |= {(way.recipe, way.name): ready(call, way) for way in ways(shape.dim)}
    found = agreeing(call, runs)
    for (recipe, name, part), times in taken(call, runs, found, args).items():
        median, p20, p80 = quantiles(times)
        cosine, rel_l1 = found[recipe, name]
        clock = power = ""
        if part == "call" and name in WATCHED and shape.name in WANTED[:2]:
            clock, power = under_load(run_of(call, runs[recipe, name]), 0.4)
        yield (
            *(shape.name, recipe, name, part, f"{median:.4f}", f"{p20:.4f}", f"{p80:.4f}"),
            *(f"{shape.flops / median / 1e9:.1f}", f"{cosine:.6f}", f"{rel_l1:.5f}", clock, power),
        )
        if part != "prepass":
            print(
                f"{shape.name:15s} {recipe:12s} {name:32s} {part:9s} {median:.4f} ms "
                f"{shape.flops / median / 1e9:6.1f} l1 {rel_l1:.4f} {clock} {power}",
                flush=True,
            )
    for (recipe, name), off in found.items():
        if off[0] < LEAST_COSINE:
            print(f"{shape.name} {recipe} {name}: WRONG {off}", flush=True)


def machine(commit: str) -> tuple[str, ...]:
    """What is told of the machine in every row."""
    from sagepatch.backends.cuda.build import nvrtc_version

    return (
        torch.cuda.get_device_name(),
        shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        torch.__version__,
        ".".join(map(str, nvrtc_version() or ())),
        commit,
        "python " + " ".join(sys.argv),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--commit", default=shell("git", "rev-parse", "--short", "HEAD"))
    args = parser.parse_args()
    start = time.monotonic()
    shapes = [next(s for s in SHAPES if s.name == name) for name in WANTED]
    compile_all(shapes)
    facts = machine(args.commit)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for shape in shapes:
            if time.monotonic() - start > args.seconds:
                print(f"{shape.name}: left out", flush=True)
                continue
            for row in measure(shape, args):
                writer.writerow((*row, *facts))
            file.flush()


if __name__ == "__main__":
    main()
