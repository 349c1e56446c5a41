"""Measures every kernel that serves a shape beside torch's own attention: checked, then timed in
turns. On a CPU it measures errors only: an emulation's time says nothing.
"""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.bench import check
from sagepatch.bench.clock import Budget, Clock, runs_that_fit
from sagepatch.bench.gpu import Load, Watch
from sagepatch.bench.shapes import Shape
from sagepatch.dispatch import Request, candidates
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import AttnSpec, Call, arch_of
from sagepatch.variant import Variant

# What is timed on a shape (`_Peer`) takes turns, ROUNDS of them, of LEAST_RUNS to MOST_RUNS runs.
ROUNDS = 3
LEAST_RUNS, MOST_RUNS = 2, 10
# Parts of a shape's time: what compiling and checking may take, and what is kept for timing.
CHECKING, TIMING = 0.6, 0.25
# Kernels that are timed on a shape however long compiling took.
LEAST_KERNELS = 3
# Errors are measured on this many of the last rows of the first heads.
ROWS_CHECKED = 256
# What torch can run exact attention by, beside its own choice.
BACKENDS = {
    "sdpa.flash": SDPBackend.FLASH_ATTENTION,
    "sdpa.cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa.efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Kernels that are measured first, as time may run out: one of each kind.
FIRST = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_t", "sage2pp_4", "sage2_8b_k128", "sage1_vb")
TOOLCHAINS = ("cuda_mma", "cuda", "triton", "emulated", "sdpa")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one shape. Times in ms, None on a CPU or where it was not timed, `runs` of
    them; `speedup` is over torch's default, `sdpa.exact`; errors against FP32 in the worst head,
    None where there is no output; `fault` says why it was not timed, None if it was or on a CPU.
    """

    shape: str
    variant: str
    dtype: str
    ms_median: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    runs: int | None = None
    tflops: float | None = None
    speedup: float | None = None
    cosine: float | None = None
    rel_l1: float | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The rows of a shape, exact attention first, and how the GPU ran meanwhile."""

    shape: Shape
    rows: tuple[Row, ...] = ()
    load: Load | None = None
    left_out: str | None = None

    def and_also(self, rows: Sequence[Row]) -> Measured:
        """These rows and more of the same shape; torch's own attention is there already."""
        known = {row.variant for row in self.rows}
        return replace(self, rows=(*self.rows, *(row for row in rows if row.variant not in known)))


@dataclass(slots=True)
class _Peer:
    """One attention on the way to its row."""

    name: str
    run: Callable[[], Tensor]
    row: Row
    times: list[float] = field(default_factory=list)


def kernels(device: torch.device, recipes: Sequence[str] = ()) -> list[Variant]:
    """Every quantised kernel to look at on a kind of device, in the order of measuring: emulated
    ones on a CPU, all others on a GPU. `recipes` names recipes or single kernels, none means all.
    """
    emulated = device.type == "cpu"

    def wanted(variant: Variant) -> bool:
        if variant is SDPA or (variant.toolchain == "emulated") != emulated:
            return False
        return not recipes or variant.recipe.name in recipes or variant.name in recipes

    def place(variant: Variant) -> tuple[bool, int]:
        return not is_main(variant, device), TOOLCHAINS.index(variant.toolchain)

    return sorted(filter(wanted, CATALOGUE), key=place)


def is_main(variant: Variant, device: torch.device) -> bool:
    """Whether a kernel is one of those that are measured before the others, which is what goes
    first on this GPU in any case.
    """
    arch = arch_of(device) if device.type == "cuda" and torch.cuda.is_available() else None
    return variant.recipe.name in FIRST or arch in variant.first_on


def refusals(variant: Variant, spec: AttnSpec, recipes: Sequence[str] = ()) -> tuple[str, ...]:
    """All reasons why a kernel is not to be tried on a call here. One that `recipes` has by its
    full name may be withheld, or made for another GPU and here for tests.
    """
    request = Request(variant.name if variant.name in recipes else "auto", emulate=True)
    return candidates(spec, request, unusable, (variant,))[0].reasons


def measure(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    variants: Sequence[Variant],
    budget: Budget,
    clock: Clock | None = None,
    recipes: Sequence[str] = (),
) -> Measured:
    """Measure exact attention and each of `variants` that serves `shape`, within a budget.

    A kernel is timed whole, quantising included, once it has agreed with its emulator. Without a
    clock errors only. `recipes` are the names asked for. Raises what a device that is lost raises.
    """
    call = shape.call(device, dtype)
    name = call.spec().dtype
    served = [variant for variant in variants if not refusals(variant, call.spec(), recipes)]
    peers = [_Peer(SDPA.name, partial(_exact, call), Row(shape.name, SDPA.name, name))]
    if clock is not None:
        peers += [
            _Peer(by, partial(_sdpa, backend, call), Row(shape.name, by, name))
            for by, backend in BACKENDS.items()
        ]
    faults = _faults(shape, device, dtype, served, budget.share(CHECKING))
    for variant in served:
        row = Row(shape.name, variant.name, name, fault=faults[variant.name])
        peers.append(_Peer(variant.name, partial(_quantised, variant, call), row))
    _find_errors(call, peers, budget)
    state = None
    if clock is not None:
        state = _take_times(device, peers, budget.rest(TIMING), clock)
    base = statistics.median(peers[0].times) if peers[0].times else None
    return Measured(shape, tuple(_timed(peer, shape, base) for peer in peers), state)


def _faults(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    variants: Sequence[Variant],
    budget: Budget,
) -> dict[str, str | None]:
    """Why each kernel must not be timed on a shape, None where it may."""
    if device.type == "cpu":
        return {variant.name: None for variant in variants}
    call = shape.reduced().call(device, dtype)
    expected = check.emulated_by_recipe(call)
    faults: dict[str, str | None] = {}
    answers = check.first_calls(variants, call, budget)
    for variant in variants:
        answer = answers[variant.name]
        if answer.out is None:
            faults[variant.name] = answer.fault
        else:
            faults[variant.name] = check.off_emulator(variant, answer.out, expected(variant.recipe))
    return faults


def _find_errors(call: Call, peers: list[_Peer], budget: Budget) -> None:
    """Run each peer that has no fault yet, and give it its error on the heads of two key heads, or
    the fault that it has now. Past the first `LEAST_KERNELS` kernels none is run in the time that
    is kept for timing.
    """
    part, heads, start = _corner(call)
    reference, _ = exact(part)
    kernels = 0
    for peer in peers:
        if peer.row.fault is not None:
            continue
        kernels += not peer.name.startswith("sdpa.")
        if kernels > LEAST_KERNELS and budget.left <= TIMING * budget.seconds:
            peer.row = replace(peer.row, fault=check.NO_TIME)
            continue
        try:
            with warnings.catch_warnings():
                # torch tells by warnings why a backend refuses, and then raises.
                warnings.simplefilter("ignore")
                out = peer.run()[:1, :heads, start:].float()
            worst = compare(out, reference).worst
        except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises
            peer.row = replace(peer.row, fault=check.said(error))
            continue
        if worst.finite:
            peer.row = replace(peer.row, cosine=worst.cosine, rel_l1=worst.rel_l1)
        else:
            peer.row = replace(peer.row, fault="the output is not finite")
    if call.q.device.type == "cuda":
        torch.cuda.synchronize(call.q.device)


def _corner(call: Call) -> tuple[Call, int, int]:
    """The last rows of the first heads as a call, how many query heads, and the first row."""
    keys = min(2, call.k.shape[1])
    heads = call.q.shape[1] // call.k.shape[1] * keys
    start = max(0, call.q.shape[2] - ROWS_CHECKED)
    offset = None if call.causal_offset is None else call.causal_offset + start
    q, k, v = call.q[:1, :heads, start:], call.k[:1, :keys], call.v[:1, :keys]
    return Call(q, k, v, call.scale, causal_offset=offset), heads, start


def _take_times(
    device: torch.device, peers: list[_Peer], budget: Budget, clock: Clock
) -> Load | None:
    """Time the peers without a fault in turns, as many as fit; the others get the fault."""
    ready = []
    for peer in peers:
        if peer.row.fault is None and budget.left > 0:
            ready.append((peer, clock(peer.run, 1)[0]))
        elif peer.row.fault is None:
            peer.row = replace(peer.row, fault=check.NO_TIME)
    fit, runs = runs_that_fit([ms for _, ms in ready], budget.left, ROUNDS, LEAST_RUNS, MOST_RUNS)
    for peer, _ in ready[fit:]:
        peer.row = replace(peer.row, fault=check.NO_TIME)
    order = [peer for peer, _ in ready[:fit]]
    watch = None
    for turn in range(ROUNDS):
        random.Random(turn).shuffle(order)
        if turn == 1 and order:
            watch = Watch(device)
        for peer in order:
            peer.times += clock(peer.run, runs)
    return None if watch is None else watch.read()


def _timed(peer: _Peer, shape: Shape, base: float | None) -> Row:
    """The row of a peer with its times."""
    if not peer.times:
        return peer.row
    median = statistics.median(peer.times)
    fifths = statistics.quantiles(peer.times, n=5)
    return replace(
        peer.row,
        ms_median=median,
        ms_p20=fifths[0],
        ms_p80=fifths[-1],
        runs=len(peer.times),
        tflops=shape.flops / median / 1e9,
        speedup=None if base is None else base / median,
    )


def _exact(call: Call) -> Tensor:
    return load(SDPA.entry)(call, SDPA.recipe)[0]


def _sdpa(backend: SDPBackend, call: Call) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            is_causal=call.causal_offset is not None,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )


def _quantised(variant: Variant, call: Call) -> Tensor:
    return load(variant.entry)(call, variant.recipe)[0]
