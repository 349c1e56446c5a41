"""One run of the bench: known answers first, then shape by shape, within a budget of seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sagepatch.backends import unusable
from sagepatch.backends.selfcheck import known_call
from sagepatch.bench.check import NO_TIME, Check, known_answers, said
from sagepatch.bench.clock import Budget, Clock, EventClock
from sagepatch.bench.measure import Measured, Row, kernels, measure
from sagepatch.bench.shapes import SMALL, STANDARD, Shape
from sagepatch.variant import Variant

SECONDS = 120.0
# Of the whole, what the known answers may take.
ANSWERING = 0.4

Step = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Results:
    """What one run found. `dtype` is of q, k and v; `seconds` of `budget_s` were spent."""

    checks: tuple[Check, ...]
    measured: tuple[Measured, ...]
    dtype: str
    seconds: float
    budget_s: float

    @property
    def rows(self) -> list[Row]:
        """Every row of every shape."""
        return [row for one in self.measured for row in one.rows]


def usual_shapes(device: torch.device) -> tuple[Shape, ...]:
    """What is measured where no shape is named."""
    return SMALL if device.type == "cpu" else STANDARD


def collect(
    shapes: Sequence[Shape],
    device: torch.device,
    dtype: torch.dtype,
    recipes: Sequence[str] = (),
    *,
    seconds: float = SECONDS,
    clock: Clock | None = None,
    step: Step | None = None,
) -> Results:
    """Check and measure kernels on `shapes` in order, in about `seconds`.

    What there is no time for is named in the results. `recipes` limits the kernels; `clock` is CUDA
    events on a GPU and nothing on a CPU unless given; `step` hears (done, of). A device lost on the
    way (by an illegal access) ends the measuring and keeps what was found.
    """
    budget = Budget(seconds)
    if clock is None and device.type == "cuda":
        clock = EventClock(device)
    variants = kernels(device, recipes)
    checks = _checks(variants, device, budget.share(ANSWERING))
    failed = {check.kernel for check in checks if check.state in ("failed", "not for this machine")}
    good = [variant for variant in variants if variant.name not in failed]
    measured: list[Measured] = []
    lost: str | None = None
    for done, shape in enumerate(shapes):
        if step is not None:
            step(done, len(shapes))
        why = lost or (NO_TIME if budget.left <= 0 else None)
        if why is not None:
            measured.append(Measured(shape, left_out=why))
            continue
        share = budget.share(1 / (len(shapes) - done))
        try:
            measured.append(measure(shape, device, dtype, good, share, clock))
        except torch.OutOfMemoryError:
            measured.append(Measured(shape, left_out="left out: out of GPU memory"))
        except RuntimeError as error:
            lost = f"left out: the GPU gave up ({said(error)})"
            measured.append(Measured(shape, left_out=lost))
    name = str(dtype).removeprefix("torch.")
    return Results(tuple(checks), tuple(measured), name, budget.spent, seconds)


def _checks(variants: Sequence[Variant], device: torch.device, budget: Budget) -> list[Check]:
    """The known answer of every kernel that this machine can run; the others by their reasons."""
    if device.type == "cpu":
        # Emulators are what kernels are checked against.
        return []
    call = known_call(device)
    refused: dict[str, str] = {}
    for variant in variants:
        here = unusable(variant)
        reasons = [*variant.rejects(call.spec()), *([] if here is None else [here])]
        if reasons:
            refused[variant.name] = "; ".join(reasons)
    tried = [variant for variant in variants if variant.name not in refused]
    found = {check.kernel: check for check in known_answers(tried, device, budget)}
    for variant in variants:
        if why := refused.get(variant.name):
            found[variant.name] = Check(
                variant.name, variant.tier, "not for this machine", why, variant.withheld
            )
    return [found[variant.name] for variant in variants]
