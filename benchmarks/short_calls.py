"""What short attention calls cost: on the GPU, on its host, and in a stream of work where the GPU
waits for the host or the host for the GPU.

    python benchmarks/short_calls.py --out DIR [--seconds 30] [--first NAME]

Writes short_calls.csv: a row a shape and kernel: the times that calibration takes (`device_us`,
`host_us`), what one event pair around one call on an idle GPU reads (`one_call_us`), and
microseconds of one call in three streams: of such calls alone, each after a matrix product that
keeps the GPU busy (`busy_us`), and each after small operations that keep the host busy (`idle_us`;
both less what the same stream takes without calls). Quantised kernels run as in a patched layer.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.candidates import candidate_variants
from sagepatch.calibration.timing import call_time
from sagepatch.dispatch import Request
from sagepatch.env import Machine
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ops import run_layer, run_variant
from sagepatch.spec import Call

# B, heads, heads of keys, queries, keys, head size, causal.
SHAPES = {
    "SDXL 1024, 64 x 64": (2, 10, 10, 4096, 4096, 64, False),
    "SDXL 1024, 32 x 32": (2, 20, 20, 1024, 1024, 64, False),
    "SDXL 1024, text": (2, 10, 10, 4096, 77, 64, False),
    "FLUX 512": (1, 24, 24, 1536, 1536, 128, False),
    "Llama 2k": (1, 32, 8, 2048, 2048, 128, True),
    "FLUX 1024": (1, 24, 24, 4608, 4608, 128, False),
}
HEAD = (
    *("shape", "kernel", "device_us", "host_us", "one_call_us", "alone_us", "busy_us", "idle_us"),
    *("gpu", "commit"),
)
CALLS, ROUNDS = 60, 3
SMALL = 24


def call_of(shape: tuple[int, int, int, int, int, int, bool]) -> Call:
    """Random numbers of a shape, in bf16."""
    B, H, Hkv, queries, keys, D, causal = shape
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(B, H, queries, D, **options)
    k, v = (torch.randn(B, Hkv, keys, D, **options) for _ in "kv")
    return Call(q, k, v, D**-0.5, causal_offset=0 if causal else None)


def one_call_us(run: Callable[[], object]) -> float:
    """What events around one call read where the GPU has nothing to do."""
    taken = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * start.elapsed_time(end))
    return statistics.median(taken)


def each_us(*steps: Callable[[], object]) -> float:
    """Microseconds of the steps, one after the other, many times over."""
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            for step in steps:
                step()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began) / CALLS)
    return min(taken)


def main() -> None:
    """Time every shape, as long as the seconds last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--first", default=next(iter(SHAPES)), choices=SHAPES, help="begin with it")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    side = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    small = torch.randn(64, device=device)
    product = partial(torch.mm, side, side)

    def little() -> None:
        for _ in range(SMALL):
            small.add(1.0)

    about = (Machine.here().gpu_name, options.commit)
    with (options.out / "short_calls.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        with torch.inference_mode():
            each_us(product, little)
            without = each_us(product), each_us(little)
            names = list(SHAPES)
            at = names.index(options.first)
            for name, shape in ((one, SHAPES[one]) for one in names[at:]):
                if time.perf_counter() - began > options.seconds:
                    break
                call = call_of(shape)
                probe = PatchedLayer("", "self", Policy(), Request("exact"), unusable)
                tried = candidate_variants(call.spec(), probe, call=call)
                for variant in (SDPA, *tried):
                    run = partial(run_variant, SDPA, call)
                    if variant is not SDPA:
                        layer = PatchedLayer("", "self", Policy(), Request(variant.name), unusable)
                        run = partial(run_layer, layer, call)
                    run()
                    found = call_time(run, device)
                    alone = each_us(run)
                    busy = each_us(product, run) - without[0]
                    idle = each_us(little, run) - without[1]
                    numbers = (*found, one_call_us(run), alone, busy, idle)
                    row = [name, variant.name, *(f"{us:.1f}" for us in numbers), *about]
                    writer.writerow(row)
                    file.flush()
                    print(f"[{time.perf_counter() - began:5.1f}]", *row[:8], flush=True)


if __name__ == "__main__":
    sys.exit(main())
