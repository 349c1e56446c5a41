"""Plans from a calibration's table: pure, monotone in each bound, without running anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import solve as solver
from sagepatch.calibration.cells import Cell, cells
from sagepatch.calibration.choose import (
    UNSERVED,
    UNSHARED,
    Choice,
    Summary,
    Times,
    check_bound,
    choose,
    pays,
    unseen,
)
from sagepatch.calibration.diagnose import explained
from sagepatch.calibration.entries import entry_of, ranged, safest
from sagepatch.calibration.sample import FEWEST_SAMPLES, Sample
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
    for name, value in given.items():
        check_bound(name, value)
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)} exclude each other: pass one of them")
    if budget is None and time_us is None:
        least = DEFAULT_THRESHOLD if threshold is None else threshold
        entries = tuple(entry_at(layer, least, by_step=by_step) for layer in table.layers)
        return _plan(table, least, entries)
    ((name, bound),) = given.items()
    if not bound >= 0:
        raise InvalidArgument(f"{name} is {bound}, needs a number from 0 up")
    if time_us is not None:
        for layer in table.layers:
            if layer.names and not layer.timed:
                raise InvalidArgument(
                    f"time_us needs measured times, and layers such as {layer.site} have none: "
                    "calibrate on a GPU, or pass budget or threshold"
                )
    found = [cells(layer.completed, by_step) for layer in table.layers]
    # Parts without own samples cost nothing and are filled in from their neighbours.
    groups = []
    summaries = [layer.candidates for layer in table.layers]
    for layer, parts, whole in zip(table.layers, found, summaries, strict=True):
        cost = costs(layer, whole)
        open_to = worthwhile(cost) if layer.timed else cost
        groups += [options(layer, cell, open_to) for cell in parts if cell.own or len(parts) == 1]
    solve = solver.within_error if budget is not None else solver.within_time
    chosen = iter(solve(groups, bound))
    picked = [
        [next(chosen) if cell.own or len(parts) == 1 else None for cell in parts] for parts in found
    ]
    every = [option for row in picked for option in row if option is not None]
    predicted = solver.combined([option.error for option in every])
    why = f"{name} {bound:g}: the output is predicted to be off by {predicted:.4f}"
    entries = tuple(
        _bounded(layer, parts, row, why, whole)
        for layer, parts, row, whole in zip(table.layers, found, picked, summaries, strict=True)
    )
    # What every layer of this plan keeps, as a threshold would say it.
    kept = [entry.cosine for entry in entries if entry.cosine is not None]
    return _plan(table, min(kept, default=1.0), entries)


def options(layer: LayerTable, cell: Cell, cost: Mapping[str, float]) -> list[solver.Option]:
    """What a solver may choose from in one part of the schedule: exact attention, and every
    candidate that stayed finite. Errors and costs are weighted with the part's share of the steps.

    `cost` says what a call costs by each kernel that there is to choose from.
    """
    found = [solver.Option(SDPA.name, 0.0, cost[SDPA.name] * cell.share)]
    if layer.samples < FEWEST_SAMPLES:
        return found
    for name in cost:
        if name != SDPA.name and all(row.errors[name].finite for row in cell.deciding(name)):
            cosines = [row.errors[name].cosine_mean for row in cell.own]
            mean = math.fsum(cosines) / len(cosines)
            error = solver.relative_error(mean) * math.sqrt(cell.share)
            found.append(solver.Option(name, error, cost[name] * cell.share))
    return found


def entry_at(layer: LayerTable, threshold: float, *, by_step: bool = True) -> PlanEntry:
    """This layer's entry at `threshold`: in each part of the schedule the fastest kernel that is
    accurate enough there.
    """
    rows = layer.completed
    parts = cells(rows, by_step and layer.samples >= FEWEST_SAMPLES)
    found, times = layer.candidates, Times(rows)

    def choice(summaries: Mapping[str, Summary], rows: Sequence[Sample]) -> Choice:
        # Times of the calls that are judged: calls of several lengths may be in a table.
        us_exact = times.us(rows, SDPA.name)
        summaries = {name: replace(one, us=times.us(rows, name)) for name, one in summaries.items()}
        made = choose(
            summaries,
            samples=len(rows),
            threshold=threshold,
            us_exact=us_exact,
            spoilt=layer.spoilt,
        )
        if not summaries and layer.unmeasured and made.reason == UNSERVED:
            return replace(made, reason=UNSHARED)
        return made

    whole = choice(found, rows)
    choices = [
        whole if len(parts) == 1 else choice(layer.over(cell, found), cell.judged) for cell in parts
    ]
    if {one.variant for one in choices} == {whole.variant}:
        entry = entry_of(layer, whole, found)
    else:
        everywhere = (whole.variant, *whole.alternatives)
        fit = [one.variant for one in choices if one.variant in (SDPA.name, *everywhere)]
        unknown = safest(found, fit or everywhere)
        entry = ranged(layer, parts, choices, everywhere, found, unknown)
    return replace(_whole(layer, entry), remedy=explained(layer.remedies, threshold))


def _whole(layer: LayerTable, entry: PlanEntry) -> PlanEntry:
    """An entry whose reason also names what its layer had less time for, or none."""
    told = entry.reason
    if layer.unmeasured:
        names = ", ".join(layer.unmeasured)
        told += f"; not measured, as a generation's time was spent: {names}"
    prompts = layer.prompts()
    fewer = [f"{n} on {layer.prompts(n)}" for n in layer.names if layer.prompts(n) < prompts]
    if fewer:
        told += f"; measured on fewer than all {prompts} prompts: {', '.join(fewer)}"
    return entry if told == entry.reason else replace(entry, reason=told)


def _bounded(
    layer: LayerTable,
    parts: Sequence[Cell],
    picked: Sequence[solver.Option | None],
    why: str,
    found: Mapping[str, Summary],
) -> PlanEntry:
    """The entry for what a solver picked in each part; alternatives are those no less accurate."""
    error = solver.combined([option.error for option in picked if option is not None])
    reason = f"{why}, of which this layer {error:.4f}"
    if layer.samples < FEWEST_SAMPLES:
        reason = unseen(layer.samples, layer.spoilt)
    elif not found:
        reason = UNSHARED if layer.unmeasured else UNSERVED
    choices = []
    for place, (cell, option) in enumerate(zip(parts, picked, strict=True)):
        if option is not None:
            name = option.variant
        else:
            # The slower of its neighbours' kernels: so a stricter bound makes no part faster.
            before = next(one for one in reversed(picked[:place]) if one is not None)
            after = next(one for one in picked[place:] if one is not None)
            cost = costs(layer, found)
            name = max((before.variant, after.variant), key=cost.__getitem__)
        choices.append(Choice(name, reason, _no_less(layer.over(cell, found), name)))
    if len(parts) == 1:
        return _whole(layer, entry_of(layer, choices[0], found))
    kept = safest(found, [choice.variant for choice in choices])
    return _whole(layer, ranged(layer, parts, choices, _no_less(found, kept), found))


def costs(layer: LayerTable, found: Mapping[str, Summary]) -> dict[str, float]:
    """What a call costs by each kernel: microseconds, or the rank of the tier where not all was
    timed.
    """
    us = {SDPA.name: layer.us_exact, **{name: summary.us for name, summary in found.items()}}
    timed = {name: one for name, one in us.items() if one is not None}
    if len(timed) == len(us):
        return timed
    return {name: float(TIERS.index(BY_NAME[name].tier)) for name in us}


def worthwhile(us: Mapping[str, float]) -> dict[str, float]:
    """Of the microseconds of kernels those of exact attention and of what pays beside it."""
    exact = us[SDPA.name]
    return {name: one for name, one in us.items() if name == SDPA.name or pays(one, exact)}


def _no_less(found: Mapping[str, Summary], variant: str) -> tuple[str, ...]:
    """The candidates that are no less accurate than one of them."""
    if variant == SDPA.name:
        return ()
    least = found[variant].cosine
    return tuple(n for n, one in found.items() if n != variant and one.cosine >= least)


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
