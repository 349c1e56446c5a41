"""The fastest plan under one bound for the whole model: a pure function of a calibration's table.

Error model: a layer's relative error in one part of the schedule is e = sqrt(2 (1 - cosine)), of
the mean cosine over heads and samples; errors of layers and steps are independent and pass on with
gain 1, so the model's output is off by sqrt(sum w e^2), w the part's share of the steps.
benchmarks/error_model.csv says how well that ranks plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One kernel that a layer may run: the relative error of its output, and what a call costs
    (microseconds, or a rank where nothing was timed).
    """

    variant: str
    error: float
    cost: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange on the way from exact to fastest: `layer` takes `option`, which adds `added` to
    the sum of squared errors and saves `saved`.
    """

    layer: int
    option: Option
    added: float
    saved: float


def relative_error(cosine: float) -> float:
    """The relative error, root mean square, of an output of the reference's norm."""
    return math.sqrt(2 * max(0.0, 1 - cosine))


def combined(errors: Sequence[float]) -> float:
    """The predicted relative error of the model's output."""
    return math.sqrt(sum(error * error for error in errors))


def steps(layers: Sequence[Sequence[Option]]) -> list[Exchange]:
    """Every exchange worth making, the most saved per squared error first.

    A layer's options are cut to those on the lower convex hull of (squared error, cost): so its
    exchanges come in order, each plan holds those of every stricter one, and moving a bound moves
    the plan one way.
    """
    found = []
    for layer, options in enumerate(layers):
        hull = _hull(options)
        for before, after in itertools.pairwise(hull):
            added = after.error**2 - before.error**2
            found.append(Exchange(layer, after, added, before.cost - after.cost))
    # Nothing added: first. Ties keep the order of the layers, so that a plan is reproducible.
    return sorted(found, key=lambda step: -math.inf if not step.added else -step.saved / step.added)


def within_error(layers: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """The option of each layer in the fastest plan whose predicted error is at most `budget`."""
    chosen = [_hull(options)[0] for options in layers]
    total = sum(option.error**2 for option in chosen)
    for step in steps(layers):
        total += step.added
        if total > budget * budget:
            break
        chosen[step.layer] = step.option
    return chosen


def within_time(layers: Sequence[Sequence[Option]], most: float) -> list[Option]:
    """The option of each layer in the most accurate plan on the way whose costs add up to at most
    `most`; the fastest plan where none does.
    """
    chosen = [_hull(options)[0] for options in layers]
    total = sum(option.cost for option in chosen)
    for step in steps(layers):
        if total <= most:
            break
        total -= step.saved
        chosen[step.layer] = step.option
    return chosen


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of (squared error, cost), from the most accurate on."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.error, o.cost)):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _above(first: Option, middle: Option, last: Option) -> bool:
    """Whether `middle` is on or above the line from `first` to `last`."""
    run, rise = last.error**2 - first.error**2, last.cost - first.cost
    return (middle.cost - first.cost) * run >= rise * (middle.error**2 - first.error**2)
