"""Times other ways to run a tile of the CUDA attention on a Hopper GPU, attention alone, each
checked against the one that serves, and writes a CSV.

    python benchmarks/cuda_tiles.py benchmarks/h200_cuda_tiles.csv
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sagepatch.backends.cuda import attention, attention_tiles
from sagepatch.backends.cuda.attention_tiles import Options, Tile
from sagepatch.backends.cuda.cache import kept
from sagepatch.backends.cuda.prepass import prepare
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

# B, H, S, D, causal
SHAPES = {
    "flux_1024": (1, 24, 4608, 128, False),
    "d128_16k": (1, 32, 16384, 128, False),
    "llama_8k_causal": (4, 32, 8192, 128, True),
    "d64_16k": (1, 32, 16384, 64, False),
    "d64_8k_causal": (2, 32, 8192, 64, True),
}
RECIPE_NAMES = ("sage2pp_8_d6", "sage2pp_8_d4", "sage2_8", "sage1_b_f32", "sage1_b")
ROUNDS, CALLS = 5, 3
COLUMNS = (
    *("shape", "recipe", "way", "tflops_median", "tflops_p20", "tflops_p80", "cos"),
    *("gpu", "torch", "nvrtc"),
)


def ways(recipe: Recipe, dim: int) -> dict[str, Tile]:
    """The tile that serves and others that might."""
    tile = attention_tiles.pick(recipe, dim, dim)
    turns = tile.warpgroups == 2 and not tile.pingpong
    found = {"serves": tile, "other turns": replace(tile, pingpong=turns)}
    if recipe.pv == "e4m3":
        found |= {f"polynomial {n}": replace(tile, polynomial=n) for n in range(5)}
        found["no ones"] = replace(tile, ones=False)
    serial = replace(tile, serial=True, pingpong=False, warpgroups=3, shares=0.0)
    for keys in (64, 128):
        # An FP16 sum ends where the recipe says; an FP32 one with the tile.
        flush = recipe.keys_per_flush or keys
        if keys % flush == 0:
            found[f"serial {keys}"] = replace(serial, block_n=keys, flush=flush)
            if recipe.pv == "e4m3":
                found[f"serial {keys} no polynomial"] = replace(
                    serial, block_n=keys, flush=flush, polynomial=0
                )
    return {way: t for way, t in found.items() if way == "serves" or t != tile}


@contextmanager
def tile_served(tile: Tile) -> Iterator[None]:
    """Take `tile` instead of what the table says."""
    served = attention_tiles.pick, attention.pick
    attention_tiles.pick = attention.pick = lambda *facts: tile  # type: ignore[assignment]
    attention_tiles.instance.cache_clear()
    try:
        yield
    finally:
        attention_tiles.pick, attention.pick = served  # type: ignore[assignment]
        attention_tiles.instance.cache_clear()


def launch_as(tile: Tile, call: Call, recipe: Recipe, out: torch.Tensor) -> attention.Launch:
    """A launch by another tile."""
    with tile_served(tile):
        return attention.Launch(attention.Shape.of(call, recipe, out))


def compile_all() -> None:
    """Every way of every recipe and shape, on all cores; the cache keeps them."""
    programs = set()
    for B, H, S, D, causal in SHAPES.values():
        for name in RECIPE_NAMES:
            recipe = RECIPES[name]
            for tile in ways(recipe, D).values():
                blocks, tiles = B * H * -(-S // tile.block_m), -(-S // tile.block_n)
                shared = attention.splits(blocks, tiles, processors(), tile.shares)
                split = not causal and tile.shares > 0 and shared
                with tile_served(tile):
                    options = Options(causal=causal, split=split)
                    programs.add(attention_tiles.instance(recipe, D, D, options).program)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(kept, programs))
    print(f"{len(programs)} programs compiled", flush=True)


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def milliseconds(run: partial[None]) -> float:
    """Mean of a few launches, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def main(path: Path) -> None:
    from sagepatch.backends.cuda.build import nvrtc_version

    facts = (
        torch.cuda.get_device_name(),
        torch.__version__,
        ".".join(map(str, nvrtc_version() or ())),
    )
    compile_all()
    rows = []
    for shape, (B, H, S, D, causal) in SHAPES.items():
        gen = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(B, H, S, D, dtype=torch.bfloat16, device="cuda", generator=gen)
            for _ in range(3)
        )
        call = Call(q, k, v, D**-0.5, causal_offset=0 if causal else None)
        flops = 4 * B * H * S * S * D / (2 if causal else 1)
        for name in RECIPE_NAMES:
            recipe = RECIPES[name]
            codes = prepare(call, recipe)
            operands = attention.Operands.of(codes)
            runs, first = {}, None
            for way, tile in ways(recipe, D).items():
                out = call.empty_out().fill_(float("nan"))
                run = partial(launch_as(tile, call, recipe, out), call, operands, out, None)
                run()
                first = out if first is None else first
                runs[way] = run, compare(out.float(), first.float()).worst.cosine
            times: dict[str, list[float]] = {way: [] for way in runs}
            for _ in range(ROUNDS):
                for way, (run, _) in runs.items():
                    times[way].append(milliseconds(run))
            for way, (_, cosine) in runs.items():
                speeds = sorted(flops / ms * 1e-9 for ms in times[way])
                at = [speeds[int(x * (ROUNDS - 1))] for x in (0.5, 0.2, 0.8)]
                speed = [f"{s:.0f}" for s in at]
                rows.append((shape, name, way, *speed, f"{cosine:.6f}", *facts))
                print(*rows[-1][:7], flush=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
