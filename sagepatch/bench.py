"""Times kernels against exact attention on this GPU, whole call, warm, with spread; on a CPU it
measures errors.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.dispatch import Request, candidates
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call
from sagepatch.variant import Variant

RUNS = 30
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A self-attention shape by name, [B, Hq, S, D] with Hkv key heads."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool = False


GPU_SHAPES = (
    Shape("flux_1024", 1, 24, 24, 4608, 128),
    Shape("cogvideox_2b", 2, 30, 30, 17776, 64),
    Shape("llama_8k_causal", 4, 32, 32, 8192, 128, True),
    Shape("d128_1k", 8, 32, 32, 1024, 128),
)
CPU_SHAPES = (Shape("small", 1, 2, 2, 512, 64), Shape("small_causal", 1, 2, 1, 500, 128, True))


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one shape. Times in ms, None on a CPU, where a time means nothing."""

    shape: str
    variant: str
    ms_median: float | None
    ms_p20: float | None
    ms_p80: float | None
    cosine: float
    rel_l1: float


def bench(shapes: Sequence[Shape], device: str, recipes: Sequence[str] = ()) -> list[Row]:
    """Run every kernel that serves each shape (or those of `recipes`); bf16 on a GPU, fp32 on a
    CPU.
    """
    rows = []
    for shape in shapes:
        call = _call(shape, device)
        reference, _ = load(SDPA.entry)(call, SDPA.recipe)
        emulate = device == "cpu"
        decisions = candidates(call.spec(), Request("auto", emulate), unusable, CATALOGUE)
        usable = [d.variant for d in decisions if not d.reasons]
        for variant in usable:
            wanted = not recipes or variant.recipe.name in recipes or variant is SDPA
            if wanted:
                rows.append(_row(shape, variant, call, reference))
    return rows


def _row(shape: Shape, variant: Variant, call: Call, reference: torch.Tensor) -> Row:
    kernel = load(variant.entry)
    out, _ = kernel(call, variant.recipe)
    worst = compare(out, reference).worst
    if call.q.device.type != "cuda":
        return Row(shape.name, variant.name, None, None, None, worst.cosine, worst.rel_l1)
    for _ in range(WARM_UP):
        kernel(call, variant.recipe)
    times = []
    for _ in range(RUNS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        kernel(call, variant.recipe)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    fifths = statistics.quantiles(times, n=5)
    return Row(
        shape.name,
        variant.name,
        statistics.median(times),
        fifths[0],
        fifths[-1],
        worst.cosine,
        worst.rel_l1,
    )


def _call(shape: Shape, device: str) -> Call:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32

    def noise(heads: int) -> torch.Tensor:
        size = (shape.batch, heads, shape.length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    q, k, v = noise(shape.q_heads), noise(shape.kv_heads), noise(shape.kv_heads)
    return Call(q, k, v, shape.head_dim**-0.5, causal_offset=0 if shape.causal else None)
