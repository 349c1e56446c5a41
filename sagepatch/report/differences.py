"""Two plans of one model side by side: the layers that they run differently; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sagepatch.backends.catalogue import SDPA
from sagepatch.errors import InvalidArgument
from sagepatch.plan import Plan, PlanRange
from sagepatch.report.model import LayerRow
from sagepatch.report.printable import printable


@dataclass(frozen=True, slots=True)
class Difference:
    """One layer that two plans run differently: what in each, the worst cosine and the time of a
    call in microseconds, None where they were not measured.
    """

    name: str
    here: str
    there: str
    cosine_here: float | None
    cosine_there: float | None
    us_here: float | None
    us_there: float | None


def differences(rows: Sequence[LayerRow], plan: Plan) -> tuple[Difference, ...]:
    """The layers of a report that `plan` would run differently; a layer it does not name is exact.

    Raises `InvalidArgument` for a plan that names layers which the report has not.
    """
    known = {row.name for row in rows}
    entries = {printable(entry.site): entry for entry in plan.entries}
    strange = sorted(set(entries) - known)
    if strange:
        raise InvalidArgument(
            f"the plan for {plan.model} names {len(strange)} layers that the report has not, such "
            f"as {strange[0]}: compare plans of one model"
        )
    found = []
    for row in rows:
        entry = entries.get(row.name)
        here = worded(row.variant, row.ranges)
        there = SDPA.name if entry is None else worded(entry.variant, entry.ranges)
        if here != there:
            found.append(
                Difference(
                    row.name,
                    here,
                    there,
                    row.cosine,
                    None if entry is None else entry.cosine,
                    row.us_chosen,
                    row.us_exact if entry is None else entry.us_chosen,
                )
            )
    return tuple(found)


def worded(variant: str, ranges: Sequence[PlanRange]) -> str:
    """What a layer runs: one kernel, or what runs up to which part of the schedule.

    >>> worded("sdpa.exact", ranges)
    'triton.sage2_8 to 12.5 %, sdpa.exact to 100 %'
    """
    if not ranges:
        return variant
    return ", ".join(f"{part.variant} to {100 * part.end:.3g} %" for part in ranges)
