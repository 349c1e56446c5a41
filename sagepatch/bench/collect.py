"""One run of the bench: known answers first, then shape by shape, within a budget of seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sagepatch.backends.selfcheck import known_call
from sagepatch.bench.check import NO_TIME, Check, known_answers, said
from sagepatch.bench.clock import Budget, Clock, EventClock
from sagepatch.bench.measure import Measured, Row, is_main, kernels, measure, refusals
from sagepatch.bench.shapes import SMALL, STANDARD, Shape
from sagepatch.variant import Variant

SECONDS = 120.0
# The part of the time left that the known answers may take.
ANSWERING = 0.4
LOST = "left out: the GPU gave up ({})"

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
    """Check and measure kernels on `shapes` in order, in about `seconds`: the most telling ones on
    every shape, then the others.

    What there is no time for is named in the results. `recipes` limits the kernels; `clock` is CUDA
    events on a GPU and nothing on a CPU unless given; `step` hears (done, of). A device lost on the
    way (by an illegal access) ends the measuring and keeps what was found.
    """
    budget = Budget(seconds)
    if clock is None and device.type == "cuda":
        clock = EventClock(device)
    variants = kernels(device, recipes)
    main = [variant for variant in variants if recipes or is_main(variant, device)]
    others = [variant for variant in variants if variant not in main]
    turns = [main, others] if others else [main]
    steps = len(turns) * (1 + len(shapes))
    checks: list[Check] = []
    measured: list[Measured] = []
    lost: str | None = None
    for number, turn in enumerate(turns):
        done = number * (1 + len(shapes))
        if step is not None:
            step(done, steps)
        found_here, lost = _checks(turn, device, recipes, budget.share(ANSWERING), lost)
        checks += found_here
        wrong = {check.kernel for check in checks if check.state in ("failed", "refused")}
        good = [variant for variant in turn if variant.name not in wrong]
        for place, shape in enumerate(shapes):
            if step is not None:
                step(done + 1 + place, steps)
            why = lost or (NO_TIME if budget.left <= 0 else None)
            found = None
            if why is None:
                share = budget.share(1 / (len(shapes) - place))
                try:
                    found = measure(shape, device, dtype, good, share, clock, recipes)
                except torch.OutOfMemoryError:
                    why = "left out: out of GPU memory"
                except RuntimeError as error:
                    why = lost = LOST.format(said(error))
            if number == 0:
                measured.append(Measured(shape, left_out=why) if found is None else found)
            elif measured[place].left_out is None:
                name = measured[place].rows[0].dtype
                rows = [Row(shape.name, v.name, name, fault=why) for v in good]
                measured[place] = measured[place].and_also(rows if found is None else found.rows)
    name = str(dtype).removeprefix("torch.")
    return Results(tuple(checks), tuple(measured), name, budget.spent, seconds)


def _checks(
    variants: Sequence[Variant],
    device: torch.device,
    recipes: Sequence[str],
    budget: Budget,
    lost: str | None = None,
) -> tuple[tuple[Check, ...], str | None]:
    """The known answer of every kernel that may be tried here, the others by their reasons; and why
    nothing can be measured any more, None where it can. `lost` says that before.
    """
    if device.type == "cpu":
        # Emulators are what kernels are checked against.
        return (), lost
    spec = known_call(device).spec()
    found: dict[str, Check] = {}
    tried = []
    for variant in variants:
        if reasons := refusals(variant, spec, recipes):
            found[variant.name] = Check(variant.name, variant.tier, "refused", "; ".join(reasons))
        else:
            tried.append(variant)
    try:
        for check in () if lost is not None else known_answers(tried, device, budget):
            found[check.kernel] = check
    except RuntimeError as error:
        lost = LOST.format(said(error))
    for variant in tried:
        found.setdefault(variant.name, Check(variant.name, variant.tier, "left out", lost))
    return tuple(found[variant.name] for variant in variants), lost
