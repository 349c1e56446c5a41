"""Times every sensible tile of the Triton attention kernel on this GPU and prints what belongs in
sagepatch/backends/triton/tiles.py.

    python benchmarks/sweep_triton.py --out sweep.csv [--workers 12] [--seconds 120]

Kernel only, over what one pre-pass left; random normal bf16 inputs. Compiles in parallel processes
first (Triton's disk cache carries the result), then times alone.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing import get_context

import torch
import triton

from sagepatch.backends.triton import attention
from sagepatch.backends.triton.masks import live_tiles
from sagepatch.backends.triton.prepass import prepare
from sagepatch.backends.triton.tiles import Tile, fit
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

RECIPE_NAMES = ("sage2_8b_k128", "sage2_8", "sage1_b", "sage1_b_f32", "sage2pp_8", "sage2pp_8_d4")
# (head_dim, causal): a long call of each, B * H * S sized to run for about a millisecond.
CASES = ((128, False), (64, False), (128, True), (64, True), (256, False))
Job = tuple[str, int, bool, Tile]


def tiles(dim: int) -> list[Tile]:
    """Tiles worth a compile for one head size."""
    found = []
    for (m, warps), n, stages, tma in itertools.product(
        ((64, 4), (128, 8)), (32, 64, 128), (2, 3, 4), (False, True)
    ):
        if (n == 32 and dim < 256) or (stages == 4 and (m == 128 or dim > 64)):
            continue
        if not tma and stages != 3:
            continue
        found.append(Tile(m, n, warps, stages, tma))
        # As many registers as let one more block of 64 queries onto a multiprocessor.
        if tma and m == 64 and dim <= 128:
            found.append(Tile(m, n, warps, stages, tma, 168 if dim == 128 else 128))
    return found


def jobs() -> list[Job]:
    """Every combination worth a compile, most interesting cases first."""
    found: list[Job] = []
    for (dim, causal), name in itertools.product(CASES, RECIPE_NAMES):
        if (causal or dim == 256) and name not in ("sage2_8b_k128", "sage1_b"):
            continue
        recipe = RECIPES[name]
        for tile in tiles(dim):
            if fit(tile, recipe) == tile:
                found.append((name, dim, causal, tile))
    return found


def make(dim: int, causal: bool, length: int, heads: int) -> Call:
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, dim, generator=gen, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    return Call(q, k, v, dim**-0.5, causal_offset=0 if causal else None)


def run_job(job: Job, call: Call) -> tuple[Tile, torch.Tensor, object]:
    name, _, _, tile = job
    recipe = RECIPES[name]
    codes = prepare(call, recipe, None)
    live = live_tiles(call, tile.block_m, tile.block_n)
    out = call.empty_out()
    attention.attend(call, recipe, tile, codes, live, out, None, None)
    return tile, out, (recipe, codes, live)


def compile_job(job: Job) -> str | None:
    """Compile one job on a short call; the reason when it cannot run."""
    try:
        run_job(job, make(job[1], job[2], 512, 2))
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="sweep.csv")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    start = time.monotonic()
    every = jobs()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(compile_job, every))
    print(f"compiled {len(every)} in {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    for job, failure in zip(every, failures, strict=True):
        if failure is not None or time.monotonic() - start > args.seconds:
            continue
        name, dim, causal, tile = job
        length = 8192
        call = make(dim, causal, length, 33)
        _, out, (recipe, codes, live) = run_job(job, call)
        ms = triton.testing.do_bench(
            lambda: attention.attend(call, recipe, tile, codes, live, out, None, None),
            warmup=10,
            rep=40,
            return_mode="median",
        )
        flops = 4 * 33 * length * length * dim / (2 if causal else 1)
        tflops = flops / ms / 1e9
        rows.append([name, dim, causal, *astuple(tile), ms, tflops])
    rows.sort(key=lambda row: (row[0], row[1], row[2], -row[-1]))
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "recipe",
                "head_dim",
                "causal",
                "block_m",
                "block_n",
                "warps",
                "stages",
                "tma",
                "registers",
                "ms",
                "tflops",
            ]
        )
        writer.writerows(rows)
    for _, group in itertools.groupby(rows, key=lambda row: row[:3]):
        for row in itertools.islice(group, 3):
            print(*row[:-2], f"{row[-2]:.3f} ms {row[-1]:.0f} TFLOPS", flush=True)


if __name__ == "__main__":
    main()
