"""Plans from a calibration's table: pure, monotone in each bound, without running anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import solve as solver
from sagepatch.calibration.cells import Cell, cells
from sagepatch.calibration.choose import FEWEST_SAMPLES, Choice, Summary, choose
from sagepatch.calibration.diagnose import explained
from sagepatch.calibration.entries import entry_of, ranged, safest
from sagepatch.calibration.sample import Sample
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import TIERS
from sagepatch.plan import DEFAULT_THRESHOLD, Plan, PlanEntry

if TYPE_CHECKING:
    from sagepatch.calibration.table import Calibration, LayerTable


def solved(
    table: Calibration,
    threshold: float | None,
    budget: float | None,
    time_us: float | None,
    by_step: bool,
) -> Plan:
    """The plan of a table under one bound at most; see `Calibration.plan`."""
    bounds_given = {"threshold": threshold, "budget": budget, "time_us": time_us}
    given = {name: value for name, value in bounds_given.items() if value is not None}
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)} exclude each other: pass one of them")
    if budget is None and time_us is None:
        least = DEFAULT_THRESHOLD if threshold is None else threshold
        entries = tuple(entry_at(layer, least, by_step=by_step) for layer in table.layers)
        return _plan(table, least, entries)
    ((name, bound),) = given.items()
    if not bound >= 0:
        raise InvalidArgument(f"{name} is {bound}, needs a number from 0 up")
    untimed = [layer.site for layer in table.layers if layer.names and not layer.timed]
    if time_us is not None and untimed:
        raise InvalidArgument(
            f"time_us needs measured times, and layers such as {untimed[0]} have none: "
            "calibrate on a GPU, or pass budget or threshold"
        )
    found = [cells(layer.rows, by_step) for layer in table.layers]
    # Parts without own samples cost nothing and are filled in from their neighbours.
    groups = [
        options(layer, cell)
        for layer, parts in zip(table.layers, found, strict=True)
        for cell in parts
        if cell.own or len(parts) == 1
    ]
    solve = solver.within_error if budget is not None else solver.within_time
    chosen = iter(solve(groups, bound))
    picked = [
        [next(chosen) if cell.own or len(parts) == 1 else None for cell in parts] for parts in found
    ]
    every = [option for row in picked for option in row if option is not None]
    predicted = solver.combined([option.error for option in every])
    why = f"{name} {bound:g}: the output is predicted to be off by {predicted:.4f}"
    entries = tuple(
        _bounded(layer, parts, row, why)
        for layer, parts, row in zip(table.layers, found, picked, strict=True)
    )
    # What every layer of this plan keeps, as a threshold would say it.
    kept = [entry.cosine for entry in entries if entry.cosine is not None]
    return _plan(table, min(kept, default=1.0), entries)


def options(layer: LayerTable, cell: Cell) -> list[solver.Option]:
    """What a solver may choose from in one part of the schedule: exact attention, and every
    candidate that stayed finite. Errors and costs are weighted with the part's share of the steps.

    Costs are times where everything was timed, else the rank of the tier.
    """
    found = [solver.Option(SDPA.name, 0.0, _cost(layer, SDPA.name) * cell.share)]
    if layer.samples < FEWEST_SAMPLES:
        return found
    judged = layer.over(cell.judged)
    for name, summary in layer.over(cell.own).items():
        if judged[name].finite:
            error = solver.relative_error(summary.cosine_mean) * math.sqrt(cell.share)
            found.append(solver.Option(name, error, _cost(layer, name) * cell.share))
    return found


def entry_at(layer: LayerTable, threshold: float, *, by_step: bool = True) -> PlanEntry:
    """This layer's entry at `threshold`: in each part of the schedule the fastest kernel that is
    accurate enough there.
    """
    parts = cells(layer.rows, by_step and layer.samples >= FEWEST_SAMPLES)
    whole = _choice(layer, layer.rows, threshold)
    choices = [_choice(layer, cell.judged, threshold) for cell in parts]
    if {choice.variant for choice in choices} == {whole.variant}:
        entry = entry_of(layer, whole)
    else:
        entry = ranged(layer, parts, choices, (whole.variant, *whole.alternatives))
    return replace(entry, remedy=explained(layer.remedies, threshold))


def _choice(layer: LayerTable, rows: tuple[Sample, ...], threshold: float) -> Choice:
    found = layer.over(rows)
    return choose(found, samples=len(rows), threshold=threshold, us_exact=layer.us_exact)


def _bounded(
    layer: LayerTable,
    parts: Sequence[Cell],
    picked: Sequence[solver.Option | None],
    why: str,
) -> PlanEntry:
    """The entry for what a solver picked in each part; alternatives are those no less accurate."""
    error = solver.combined([option.error for option in picked if option is not None])
    reason = f"{why}, of which this layer {error:.4f}"
    choices = []
    for place, (cell, option) in enumerate(zip(parts, picked, strict=True)):
        if option is not None:
            name = option.variant
        else:
            # Of its neighbours' kernels the slower one: so moving a bound moves this part one way.
            before = next(one for one in reversed(picked[:place]) if one is not None)
            after = next(one for one in picked[place:] if one is not None)
            name = max((before.variant, after.variant), key=lambda one: _cost(layer, one))
        choices.append(Choice(name, reason, _no_less(layer.over(cell.judged), name)))
    if len(parts) == 1:
        return entry_of(layer, choices[0])
    kept = safest(layer, [choice.variant for choice in choices])
    return ranged(layer, parts, choices, _no_less(layer.candidates, kept))


def _cost(layer: LayerTable, variant: str) -> float:
    """What a call costs: microseconds, or the rank of the tier where not all was timed."""
    if layer.timed:
        us = layer.us_exact if variant == SDPA.name else layer.candidates[variant].us
        if us is not None:
            return us
    return float(TIERS.index(BY_NAME[variant].tier))


def _no_less(summaries: dict[str, Summary], variant: str) -> tuple[str, ...]:
    """The candidates that are no less accurate than one of them."""
    shown = summaries.get(variant)
    return tuple(
        name
        for name, other in summaries.items()
        if shown is not None and name != variant and other.cosine >= shown.cosine
    )


def _plan(table: Calibration, threshold: float, entries: tuple[PlanEntry, ...]) -> Plan:
    return Plan(
        table.fingerprint,
        table.model,
        threshold,
        table.emulated,
        table.gpu,
        table.versions,
        entries,
    )
