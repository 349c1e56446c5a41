"""A layer's samples by section of the schedule, and which of them decide in each.

Nothing is chosen on one sample: a section that has only one is judged together with its neighbours,
and so is a candidate that was measured in it only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sagepatch.calibration.sample import FEWEST_SAMPLES, Sample
from sagepatch.calibration.sections import COUNT, bounds, section_of
from sagepatch.schedule import fraction


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer in one part of the schedule: `own` samples were taken in it, `judged` ones decide.

    `share` is the part of the schedule's steps that are in it, 0 where none was. `more` are the
    nearest samples beside them that measured a candidate which too few of the judged ones did.
    """

    start: float
    end: float
    own: tuple[Sample, ...]
    judged: tuple[Sample, ...]
    share: float
    more: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def deciding(self, name: str) -> tuple[Sample, ...]:
        """The samples that decide on a candidate."""
        return (*self.judged, *self.more.get(name, ()))


def cells(rows: tuple[Sample, ...], by_step: bool = True) -> tuple[Cell, ...]:
    """The parts of the schedule that a layer's samples tell apart, in order; one part where the
    samples have no place in a schedule.

    The first part begins at 0 and the last one ends at 1, wherever their samples are. A part
    between others may have no samples of its own. Samples without a place count in every part.
    """
    placed = [(section_of(row.at), row) for row in rows if row.at is not None] if by_step else []
    if not placed:
        return (Cell(0.0, 1.0, rows, rows, 1.0),)
    floating = tuple(row for row in rows if row.at is None)
    held: dict[int, tuple[Sample, ...]] = {}
    for section, row in placed:
        held[section] = (*held.get(section, ()), row)
    shares = _shares([row for _, row in placed])
    seen = sorted(held)
    found = []
    for section in range(seen[0], seen[-1] + 1):
        own = held.get(section, ())
        judged = own
        if len(own) < FEWEST_SAMPLES:
            before = [held[other] for other in seen if other < section][-1:]
            after = [held[other] for other in seen if other > section][:1]
            judged = sum((*before, own, *after), ())
        start = 0.0 if section == seen[0] else bounds(section)[0]
        end = 1.0 if section == seen[-1] else bounds(section)[1]
        share = shares[section] if own else 0.0
        judged = (*floating, *judged)
        near = sorted(seen, key=lambda other: abs(other - section))
        known = {id(row) for row in judged}
        beside = [row for other in near for row in held[other] if id(row) not in known]
        found.append(Cell(start, end, own, judged, share, _more(judged, beside)))
    return tuple(found)


def _more(judged: Sequence[Sample], beside: Sequence[Sample]) -> dict[str, tuple[Sample, ...]]:
    """The first samples of `beside` that measured a candidate which fewer than needed of the judged
    ones did, by candidate.
    """
    found = {}
    for name in dict.fromkeys(name for row in judged for name in row.errors):
        lacking = FEWEST_SAMPLES - sum(_measured(row, name) for row in judged)
        if lacking > 0:
            rows = [row for row in beside if _measured(row, name)]
            if rows:
                found[name] = tuple(rows[:lacking])
    return found


def _measured(row: Sample, name: str) -> bool:
    return name in row.errors and not row.errors[name].estimated


def _shares(rows: Sequence[Sample]) -> list[float]:
    """The part of the steps that fall in each section, for the step counts of these samples."""
    totals = [0.0] * COUNT
    for steps, times in Counter(row.steps for row in rows if row.steps).items():
        for step in range(steps):
            totals[section_of(fraction(step, steps))] += times / len(rows) / steps
    return totals
