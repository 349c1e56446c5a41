"""Times kernels beside exact attention on one device: checked first, warm, with spread. On a CPU it
measures errors only: an emulation's time says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.dispatch import Request, candidates
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call
from sagepatch.variant import Variant

RUNS = 30
WARM_UP = 5
# A kernel is checked against its emulator on this much of the shape before it is timed.
CHECKED_HEADS = 2
CHECKED_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """Self-attention of one size by name: [batch, q_heads, length, head_dim] with kv_heads keys."""

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Operations of both matrix products, halved where causal."""
        whole = 4.0 * self.batch * self.q_heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    def reduced(self) -> Shape:
        """The same kind of call, small enough to emulate."""
        shared = self.q_heads // self.kv_heads
        heads = min(CHECKED_HEADS, self.kv_heads)
        length = min(CHECKED_LENGTH, self.length)
        return Shape(self.name, 1, heads * shared, heads, length, self.head_dim, self.causal)


GPU_SHAPES = (
    Shape("cogvideox_2b", 2, 30, 30, 17776, 64),
    Shape("flux_1024", 1, 24, 24, 4608, 128),
    Shape("hunyuan_33k", 1, 24, 24, 32768, 128),
    Shape("llama_8k_causal", 4, 32, 32, 8192, 128, True),
    Shape("d64_16k", 1, 32, 32, 16384, 64),
    Shape("d128_16k", 1, 32, 32, 16384, 128),
    Shape("d128_4k", 4, 32, 32, 4096, 128),
    Shape("d64_8k_causal", 2, 32, 32, 8192, 64, True),
    Shape("d128_1k", 8, 32, 32, 1024, 128),
)
CPU_SHAPES = (
    Shape("small_d64", 1, 2, 2, 500, 64),
    Shape("small_d128_causal_gqa", 1, 4, 2, 333, 128, True),
)
SHAPES = {shape.name: shape for shape in (*GPU_SHAPES, *CPU_SHAPES)}


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one shape. Times in ms, None on a CPU or where the check failed; errors against
    exact attention in the worst head; `fault` says how the kernel failed its check, None if it
    passed.
    """

    shape: str
    variant: str
    dtype: str
    ms_median: float | None
    ms_p20: float | None
    ms_p80: float | None
    tflops: float | None
    speedup: float | None
    cosine: float
    rel_l1: float
    fault: str | None = None


Timer = Callable[[Callable[[], object]], list[float]]


def bench(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype,
    recipes: Sequence[str] = (),
    *,
    timer: Timer | None = None,
) -> Iterator[Row]:
    """Yield a row for exact attention and each kernel that serves a shape (of `recipes`, if any).

    Kernels are timed whole, quantising included, exact attention in the same run. `timer` gives
    the times of a call in ms; by default CUDA events on a GPU, none on a CPU.
    """
    clock = timer or (_events_ms if device.type == "cuda" else None)
    for shape in shapes:
        call = make_call(shape, device, dtype)
        exact, _ = load(SDPA.entry)(call, SDPA.recipe)
        base = None if clock is None else clock(partial(load(SDPA.entry), call, SDPA.recipe))
        yield _row(shape, SDPA, call, exact, exact, base, base)
        request = Request("auto", emulate=device.type == "cpu")
        for decision in candidates(call.spec(), request, unusable, CATALOGUE):
            variant = decision.variant
            left_out = recipes and variant.recipe.name not in recipes
            if decision.reasons or variant is SDPA or left_out:
                continue
            kernel = load(variant.entry)
            out, _ = kernel(call, variant.recipe)
            fault = check(variant, shape, device, dtype)
            times = None
            if clock is not None and fault is None:
                times = clock(partial(kernel, call, variant.recipe))
            yield _row(shape, variant, call, out, exact, times, base, fault)


def check(variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """How the kernel misses its emulator beyond its own tolerance, None where it does not."""
    if variant.toolchain == "emulated":
        return None
    call = make_call(shape.reduced(), device, dtype)
    out, _ = load(variant.entry)(call, variant.recipe)
    expected, _ = emulate(call, variant.recipe)
    worst = compare(out, expected).worst
    limit = variant.tolerance
    if worst.finite and worst.cosine >= limit.cosine and worst.rel_l1 <= limit.rel_l1:
        return None
    return (
        f"off its emulator: cosine {worst.cosine:.5f} (needs {limit.cosine:g}), "
        f"relative L1 {worst.rel_l1:.4f} (at most {limit.rel_l1:g})"
    )


def make_call(shape: Shape, device: torch.device, dtype: torch.dtype) -> Call:
    """Random normal q, k, v of a shape from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(heads: int) -> torch.Tensor:
        size = (shape.batch, heads, shape.length, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    q, k, v = noise(shape.q_heads), noise(shape.kv_heads), noise(shape.kv_heads)
    return Call(q, k, v, shape.head_dim**-0.5, causal_offset=0 if shape.causal else None)


def _row(
    shape: Shape,
    variant: Variant,
    call: Call,
    out: torch.Tensor,
    exact: torch.Tensor,
    times: list[float] | None,
    base: list[float] | None,
    fault: str | None = None,
) -> Row:
    worst = compare(out, exact).worst
    name, dtype = variant.name, call.spec().dtype
    if times is None or base is None:
        none = (None, None, None, None, None)
        return Row(shape.name, name, dtype, *none, worst.cosine, worst.rel_l1, fault)
    median = statistics.median(times)
    fifths = statistics.quantiles(times, n=5)
    return Row(
        shape.name,
        name,
        dtype,
        median,
        fifths[0],
        fifths[-1],
        shape.flops / median / 1e9,
        statistics.median(base) / median,
        worst.cosine,
        worst.rel_l1,
        fault,
    )


def _events_ms(run: Callable[[], object]) -> list[float]:
    """Times of a call on the current CUDA stream in ms, by events, after a warm-up."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(RUNS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
