"""Times one attention call under Ulysses on the GPUs of this host, from each process's share of the
tokens to its share of the output, by what the processes exchange, and writes a table.

    python benchmarks/ulysses_exchange.py --out benchmarks/ulysses_exchange.csv

The ways: diffusers' exchanges of q, k and v in 16 bits around torch's attention, the same around
ours, ours after a single exchange of all three (what sagepatch does), and ours after an exchange of
codes: each process quantises its own tokens, around the mean of everybody's keys, and sends 8-bit
Q, K and V.
A time is that of the slowest process, and is written after every process's output was checked.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from h200_end_to_end import commit
from torch import Tensor

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.dispatch import Request
from sagepatch.env import VERSION, nvidia_driver
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.numerics.attention import exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call

RECIPE = "sage2_8b_k128"
LEAST_COSINE = 0.998
ROWS_CHECKED = 256
CALLS, ROUNDS = 4, 5
DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class Shape:
    """Self-attention of one sample; whole tiles of tokens for each process, so that codes join."""

    name: str
    tokens: int
    heads: int
    head_dim: int = 128


SHAPES = (
    Shape("flux_1024", 4608, 24),
    Shape("flux_2048", 16896, 24),
    Shape("wan_14b_480p", 32768, 40),
    Shape("hunyuan_720p", 119040, 24),
)


def all_to_all(sent: Tensor) -> Tensor:
    """Part r of the first axis goes to process r."""
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return got


def give_back(out: Tensor) -> Tensor:
    """All tokens of this process's heads, [B, h, S, D] with memory order [B, S, h, D], to this
    process's tokens of all heads, [B, S / world, H, D].
    """
    B, h, S, D = out.shape
    world = dist.get_world_size()
    parts = out.transpose(1, 2).view(B, world, S // world, h, D).permute(1, 2, 0, 3, 4)
    got = all_to_all(parts.contiguous())
    return got.permute(2, 1, 0, 3, 4).reshape(B, S // world, world * h, D)


@contextmanager
def everybody_s_statistics() -> Iterator[None]:
    """Between the two launches of the pre-pass, sums of K and peaks of V of all processes take the
    place of this one's: they count as more chunks.
    """
    from sagepatch.backends.triton import prepass

    def launch(
        kernel: Any, programs: int, args: Any, constants: Any, *rest: Any, **options: Any
    ) -> None:
        if kernel is prepass.quantise:
            sums, counts, peaks = args[6:9]
            world, chunks = dist.get_world_size(), constants["CHUNKS"]
            own = torch.cat((sums, counts[:, None], peaks.view(torch.float32)), 1)
            got = own.new_empty((world * own.shape[0], own.shape[1]))
            dist.all_gather_into_tensor(got, own)
            # [groups, world, chunks, numbers]
            merged = got.view(world, -1, chunks, own.shape[1]).transpose(0, 1).flatten(0, 2)
            parts = merged.split((sums.shape[1], 1, peaks.shape[1]), 1)
            new = [part.contiguous() for part in parts]
            args = (*args[:6], new[0], new[1].view(-1), new[2].view(torch.int32), *args[9:])
            constants = {**constants, "CHUNKS": chunks * world}
        before(kernel, programs, args, constants, *rest, **options)

    before = prepass.launch
    prepass.launch = launch
    try:
        yield
    finally:
        prepass.launch = before


def codes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Quantised where the tokens are, exchanged in one piece, attended from codes."""
    from sagepatch.backends.triton.attention import attend, tile_of
    from sagepatch.backends.triton.prepass import prepare

    recipe = BY_NAME[f"triton.{RECIPE}"].recipe
    B, S, H, D = q.shape
    world, rank = dist.get_world_size(), dist.get_rank()
    h = H // world
    assert B == 1
    own = Call(*(tensor.transpose(1, 2) for tensor in (q, k, v)), D**-0.5)
    with everybody_s_statistics():
        made = prepare(own, recipe, None)
    assert made.skv_pad == S
    parts = [made.q_i8, made.k_i8, made.v_codes, made.q_scale_log2, made.k_scale]
    # Of one sample, the heads of a process are one stretch of memory.
    raw = [part.view(torch.uint8).view(world, -1) for part in parts]
    got = all_to_all(torch.cat(raw, 1)).split([part.shape[1] for part in raw], 1)

    def tokens_joined(number: int, axis: int) -> Tensor:
        part = parts[number]
        shape = (world, h, *part.shape[2:])
        mine = got[number].reshape(-1).view(part.dtype).view(shape)  # [world, h, ...]
        return mine.movedim(0, axis).flatten(axis, axis + 1).contiguous()[None]

    mine = replace(
        made,
        q_i8=tokens_joined(0, 1),
        k_i8=tokens_joined(1, 1),
        v_codes=tokens_joined(2, 2),
        q_scale_log2=tokens_joined(3, 1),
        k_scale=tokens_joined(4, 1),
        v_scale=made.v_scale[rank * h : (rank + 1) * h].contiguous(),
        skv_pad=world * S,
    )
    # Shapes alone: attention reads codes.
    nothing = q.new_empty(1).expand(B, h, world * S, D)
    call = Call(nothing, nothing, nothing, D**-0.5, bshd_out=True)
    out = call.empty_out()
    attend(call, recipe, tile_of(call, recipe), mine, None, out, None, None)
    return give_back(out)


def ways_of(config: Any) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """diffusers' exchange around torch's attention and around ours, and what sagepatch does."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from sagepatch.patchers.parallel import exchanged_by_diffusers, exchanged_once

    layer = PatchedLayer("site", "self", Policy(guard="off"), Request("exact"), unusable)
    layer.run_with(Request(f"triton.{RECIPE}"), "asked for")

    # The layer lives as long as these functions.
    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exchanged_by_diffusers(q, k, v, None, q.shape[3] ** -0.5, layer.handle, config)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exchanged_once(q, k, v, q.shape[3] ** -0.5, layer.handle, config)

    return {
        "diffusers, torch": functools.partial(dispatch_attention_fn, parallel_config=config),
        "diffusers, ours": theirs,
        "one exchange, ours": ours,
        "codes, ours": codes,
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one shape; `sent_mb` leaves each process, the output included."""

    shape: str
    way: str
    gpus: int
    ms_median: str
    ms_p20: str
    ms_p80: str
    speedup: str
    sent_mb: str
    cos: str
    rel_l1: str


def measured(way: Callable[..., Tensor], shares: list[Tensor]) -> list[float]:
    """Milliseconds of a call on the slowest process, a round of several calls each."""
    for _ in range(2):
        way(*shares)
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            way(*shares)
        end.record()
        end.synchronize()
        slowest = torch.tensor([start.elapsed_time(end) / CALLS], device=DEVICE)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return found


def worst(out: Tensor, whole: list[Tensor]) -> tuple[float, float]:
    """Cosine and relative L1 against FP32, the worst over processes, on the first and last head and
    the last rows of each share.
    """
    S = out.shape[1]
    start = S - ROWS_CHECKED
    heads = [0, out.shape[2] - 1]
    q = whole[0].tensor_split(dist.get_world_size(), 1)[dist.get_rank()][:, start:, heads]
    k, v = (tensor[:, :, heads] for tensor in whole[1:])
    call = Call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q.shape[3] ** -0.5)
    found = compare(out[:, start:, heads].transpose(1, 2).float(), exact(call)[0]).worst
    told = torch.tensor([-found.cosine, found.rel_l1], device=out.device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return -float(told[0]), float(told[1])


def rows_of(shape: Shape, config: Any) -> Iterator[Row]:
    gen = torch.Generator(DEVICE).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    whole = [torch.randn(size, generator=gen, device=DEVICE).bfloat16() for _ in range(3)]
    # A mean that differs between the processes' keys, which smoothing must agree on.
    whole[1] += torch.linspace(0, 2, shape.tokens, device=DEVICE)[None, :, None, None].bfloat16()
    world = dist.get_world_size()
    shares = [t.tensor_split(world, 1)[dist.get_rank()].contiguous() for t in whole]
    sent = shares[0].numel() * (world - 1) / world / 1e6
    first = None
    for name, way in ways_of(config).items():
        cosine, rel_l1 = worst(way(*shares), whole)
        if cosine < LEAST_COSINE:
            raise RuntimeError(f"{shape.name}, {name}: cosine {cosine:.5f}")
        ms = measured(way, shares)
        cuts = statistics.quantiles(ms, n=5)
        median = statistics.median(ms)
        first = median if first is None else first
        # Bytes of Q, K, V and of the output; scales are 2 x 4 bytes a token and head.
        each = 3 + 8 / shape.head_dim + 2 if name.startswith("codes") else 8
        numbers = (f"{median:.4f}", f"{cuts[0]:.4f}", f"{cuts[3]:.4f}", f"{first / median:.3f}")
        errors = (f"{cosine:.6f}", f"{rel_l1:.5f}")
        yield Row(shape.name, name, world, *numbers, f"{sent * each:.1f}", *errors)


def process(rank: int, world: int, args: argparse.Namespace, meeting: str) -> None:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    began = time.monotonic()
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(args.backend, init_method=meeting, rank=rank, world_size=world)
    shared = ContextParallelConfig(ulysses_degree=world)
    mesh = dist.device_mesh.init_device_mesh(
        DEVICE, shared.mesh_shape, mesh_dim_names=shared.mesh_dim_names
    )
    config = ParallelConfig(context_parallel_config=shared)
    config.setup(rank, world, torch.device(DEVICE, rank if DEVICE == "cuda" else 0), mesh=mesh)
    with open(args.out if rank == 0 else os.devnull, "w", newline="", encoding="utf-8") as file:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "driver": nvidia_driver(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "sagepatch": VERSION,
            "commit": args.commit,
            "command": "python " + " ".join(args.command),
        }
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, [*names, *facts], lineterminator="\n")
        writer.writeheader()
        with torch.inference_mode():
            for shape in SHAPES:
                for row in rows_of(shape, config):
                    values = {name: getattr(row, name) for name in names}
                    writer.writerow({**values, **facts})
                    file.flush()
                    if rank == 0:
                        print(f"{time.monotonic() - began:.0f} s", *values.values(), flush=True)
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/ulysses_exchange.csv")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count())
    args = parser.parse_args()
    args.command = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        torch.multiprocessing.spawn(process, (args.processes, args, meeting), nprocs=args.processes)


if __name__ == "__main__":
    main()
