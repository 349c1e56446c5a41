"""What the scripts of the HTML page work on: the table of measurements, the plans, the times. Pure;
renders nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.cells import Cell, cells
from sagepatch.calibration.choose import (
    LEAST_GAIN,
    UNSERVED,
    Times,
    unseen,
)
from sagepatch.calibration.planning import costs, entry_at, options
from sagepatch.calibration.sample import FEWEST_SAMPLES, HeadErrors
from sagepatch.calibration.table import LayerTable
from sagepatch.numerics.recipe import TIERS
from sagepatch.plan import Plan, PlanEntry
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.printable import printable

# What errors are shown relative to where the threshold admits everything or nothing.
USUAL_THRESHOLD = 0.998
# A threshold that no cosine reaches, even one that rounding takes a little over 1.
ABOVE_ALL = 1.01


def bound_of(report: Report) -> float:
    """The threshold that errors are shown relative to."""
    return report.threshold if 0 < report.threshold < 1 else USUAL_THRESHOLD


def facts(report: Report) -> dict[str, Any] | None:
    """The page's facts as a JSON value without NaN; None where no table of measurements is known.

    Numbers that plans are solved from keep all their digits, so that the page finds the same plan
    as Python. Numbers that are only shown are rounded.
    """
    table = report.calibration
    if table is None or not table.layers:
        return None
    rows = {row.name: row for row in report.layers}
    steps = steps_of(table.layers)
    return {
        "threshold": report.threshold,
        "bound": bound_of(report),
        "stops": stops(report.threshold),
        "least_gain": LEAST_GAIN,
        "none_serves": UNSERVED,
        "exact": SDPA.name,
        "kernels": _kernels(table.layers),
        "timed": any(layer.us_exact is not None for layer in table.layers),
        "by_step": _by_step(table.layers, rows, report.threshold),
        "run_us": None if report.run_seconds is None else report.run_seconds * 1e6,
        "layers": [_layer(layer, rows[printable(layer.site)], steps) for layer in table.layers],
        "plans": {name: _plan(plan) for name, plan in report.plans},
        "steps": [{"at": step.at, "name": step.name} for step in steps],
    }


def _by_step(layers: Sequence[LayerTable], rows: Mapping[str, LayerRow], threshold: float) -> bool:
    """Whether what the layers run is the plan that may change over the schedule."""
    return all(
        _runs(entry_at(layer, threshold)) == _runs(rows[printable(layer.site)]) for layer in layers
    )


def stops(threshold: float) -> list[float]:
    """Where the slider can stand, ascending: everything finite, round thresholds ever closer to 1,
    the report's own, and everything exact.
    """
    round_ones = {
        round(1 - tenths * 10.0**-digits, digits + 1)
        for digits in range(1, 7)
        for tenths in (9, 8, 7, 6, 5, 4, 3, 2.5, 2, 1.5, 1)
    }
    return sorted({0.0, ABOVE_ALL, threshold} | {one for one in round_ones if one >= 0.9})


@dataclass(frozen=True, slots=True)
class Step:
    """A column of the heat map: a place in the schedule, or the number of a call without one."""

    at: float | None
    call: int | None
    name: str


def steps_of(layers: Sequence[LayerTable]) -> list[Step]:
    """The columns of the heat map, in order: places in the schedule as steps where all samples
    are of one number of steps, else as percentages; then calls without a place.
    """
    samples = [row for layer in layers for row in layer.rows]
    places = sorted({row.at for row in samples if row.at is not None})
    counts = {row.steps for row in samples if row.at is not None}
    count = counts.pop() if len(counts) == 1 else None
    found = [
        Step(at, None, f"{100 * at:.3g} %" if not count else f"step {round(at * (count - 1)) + 1}")
        for at in places
    ]
    calls = sorted({row.call for row in samples if row.at is None})
    return [*found, *(Step(None, call, f"call {call}") for call in calls)]


def _kernels(layers: Iterable[LayerTable]) -> dict[str, dict[str, Any]]:
    """Tier and rank of each kernel in the table; ranks order kernels as `choose` does."""
    names = {name for layer in layers for name in layer.names} | {SDPA.name}
    places = {name: place for place, name in enumerate(BY_NAME)}
    order = {name: (TIERS.index(BY_NAME[name].tier), places[name]) for name in names}
    ranked = sorted(names, key=lambda name: order[name])
    return {name: {"tier": BY_NAME[name].tier, "rank": n} for n, name in enumerate(ranked)}


def _layer(layer: LayerTable, row: LayerRow, steps: Sequence[Step]) -> dict[str, Any]:
    enough = layer.samples >= FEWEST_SAMPLES
    rows = layer.completed
    cost, times = costs(layer, layer.candidates), Times(rows)
    return {
        "site": row.name,
        "us_exact": layer.us_exact,
        "runs": _runs(row),
        "reason": row.reason,
        "calls": row.calls_as_measured,
        "cells": [_cell(layer, cell, cost, times) for cell in cells(rows, enough)],
        "whole": [_cell(layer, cell, cost, times) for cell in cells(rows, by_step=False)],
        "prompts": layer.prompts(),
        "measured_on": {name: layer.prompts(name) for name in layer.names},
        "us": {name: summary.us for name, summary in layer.candidates.items()},
        "steps": {name: _errors(layer, name, steps) for name in layer.names},
    }


def _unseen(layer: LayerTable, samples: int) -> str | None:
    """Why so few samples decide nothing; None where they are enough."""
    return None if samples >= FEWEST_SAMPLES else unseen(samples, layer.spoilt)


def _runs(entry: LayerRow | PlanEntry) -> list[dict[str, Any]]:
    """What a layer runs from where to where in the schedule."""
    if not entry.ranges:
        return [{"start": 0.0, "end": 1.0, "variant": entry.variant}]
    return [
        {"start": part.start, "end": part.end, "variant": part.variant} for part in entry.ranges
    ]


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        printable(entry.site): {"runs": _runs(entry), "why": printable(entry.reason)}
        for entry in plan.entries
    }


def _cell(layer: LayerTable, cell: Cell, cost: Mapping[str, float], times: Times) -> dict[str, Any]:
    """One part of the schedule: what decides there, and what it weighs. `error` is what the error
    model of `calibration.solve` adds up, None for a part without samples of its own.
    """
    weighed = options(layer, cell, cost) if cell.own else []
    errors = {option.variant: option.error for option in weighed}
    return {
        "start": cell.start,
        "end": cell.end,
        "share": cell.share,
        "unseen": _unseen(layer, len(cell.judged)),
        "us_exact": times.us(cell.judged, SDPA.name),
        "candidates": [
            {
                "variant": name,
                "finite": summary.finite,
                "cosine": finite(summary.cosine),
                "rel_l1": finite(summary.rel_l1),
                "norm_ratio": finite(summary.norm_ratio),
                "worst_head": summary.worst_head,
                "worst_place": summary.worst_place or f"call {summary.worst_call}",
                "us": times.us(cell.judged, name),
                "by_host": summary.by_host,
                "error": errors.get(name),
            }
            for name, summary in layer.over(cell, layer.names).items()
        ],
    }


def errors_of_row(layer: LayerTable, row: LayerRow, steps: Sequence[Step]) -> list[float | None]:
    """1 - cosine, in the worst head, of what a layer runs in each column of the heat map; None
    where that is exact attention, or was not measured.
    """
    found: list[float | None] = []
    for step in steps:
        part = next((one for one in row.ranges if step.at is not None and one.holds(step.at)), None)
        name = row.variant if part is None else part.variant
        rows = _at(layer, name, step) if name in layer.names else []
        found.append(1 - min(min(one.cosine) for one in rows) if rows else None)
    return found


def _errors(layer: LayerTable, name: str, steps: Sequence[Step]) -> list[dict[str, Any] | None]:
    """A kernel's errors in each column, the worst of all samples there; None where it has none."""
    measured = [_at(layer, name, step) for step in steps]
    return [_worst(rows) if rows else None for rows in measured]


def _at(layer: LayerTable, name: str, step: Step) -> list[HeadErrors]:
    """A kernel's errors on the samples of one column."""
    return [
        row.errors[name]
        for row in layer.rows
        if name in row.errors
        and (row.at == step.at if step.at is not None else row.at is None and row.call == step.call)
    ]


def _worst(rows: Sequence[HeadErrors]) -> dict[str, Any]:
    heads = [min(several) for several in zip(*(row.cosine for row in rows), strict=False)]
    norms = [ratio for row in rows for ratio in row.norm_ratio]
    return {
        "cosine": _short(min(heads)),
        "worst_head": heads.index(min(heads)),
        "rel_l1": _short(max(one for row in rows for one in row.rel_l1)),
        "norm_ratio": _short(max(norms, key=lambda ratio: abs(ratio - 1))),
        "heads": [_short(one) for one in heads],
    }


def _short(value: float) -> float | None:
    """Digits enough to be shown; the distance from 1 is what counts."""
    return round(value, 7) if math.isfinite(value) else None


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: null compares as NaN does."""
    return value if math.isfinite(value) else None
