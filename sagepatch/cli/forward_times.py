"""Times on this GPU that a prediction needs: attention calls by shape, exact and quantised, and the
rate of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.candidates import candidate_variants
from sagepatch.calibration.measure import ROUNDS, TIMERS, Stopwatch
from sagepatch.cli.forward_cost import Shape, Times
from sagepatch.dispatch import Request
from sagepatch.errors import KernelUnavailable
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.spec import Call

# A product this large runs at the rate that a GPU sustains.
SIDE = 8192
DTYPE = torch.bfloat16


def rate(device: torch.device) -> float:
    """Floating-point operations a microsecond of a large matrix product in bf16."""
    a = torch.randn(SIDE, SIDE, device=device, dtype=DTYPE)
    b = torch.randn(SIDE, SIDE, device=device, dtype=DTYPE)
    time = TIMERS[device.type]
    us = min(time(lambda: a @ b, device, True).us for _ in range(ROUNDS))
    return 2 * float(SIDE) ** 3 / us


def measured(
    shapes: Iterable[Shape], device: torch.device, each: Callable[[], object]
) -> dict[Shape, Times]:
    """Times of each shape in bf16 on random numbers; `each` is called after every shape.

    The kernels tried are those that calibration tries. Where exact attention does not fit in
    memory torch's error is raised.
    """
    found = {}
    for shape in dict.fromkeys(shapes):
        found[shape] = _times(shape, device)
        each()
    return found


def _times(shape: Shape, device: torch.device) -> Times:
    call = _call(shape, device)
    spec = call.spec()
    stopwatch = Stopwatch()
    layer = PatchedLayer("", "self", Policy(), Request("exact"), unusable)
    best: dict[str, float] = {}
    exact = _lowest(partial(stopwatch.us, SDPA, call, spec))
    for variant in candidate_variants(spec, layer):
        try:
            us = _lowest(partial(stopwatch.us, variant, call, spec))
        except KernelUnavailable:
            # Found before a launch: the next candidate is timed.
            continue
        best[variant.tier] = min(us, best.get(variant.tier, us))
    return Times(exact, best.get("fast"), best.get("safe"))


def _lowest(time: Callable[[], float | None]) -> float:
    taken = [us for _ in range(ROUNDS) if (us := time()) is not None]
    return min(taken)


def _call(shape: Shape, device: torch.device) -> Call:
    """A call of that shape on random numbers; a mask keeps all."""

    def noise(heads: int, length: int, size: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, length, size, device=device, dtype=DTYPE)

    keep = torch.ones(1, 1, 1, shape.keys, dtype=torch.bool, device=device)
    return Call(
        noise(shape.heads, shape.queries, shape.head_dim),
        noise(shape.kv_heads, shape.keys, shape.head_dim),
        noise(shape.kv_heads, shape.keys, shape.v_head_dim),
        shape.head_dim**-0.5,
        attn_mask=keep if shape.mask else None,
        causal_offset=0 if shape.causal else None,
    )
