"""Which samples of a layer are kept: memory stays bounded however many prompts are measured."""

from __future__ import annotations

from collections.abc import Iterable

from sagepatch.calibration.sample import FEWEST_SAMPLES, Sample
from sagepatch.calibration.sections import section_of

# Samples that are kept of each section of the schedule. More where there are more candidates, as
# the worst sample of each candidate is always kept.
MOST_OF_SECTION = 4
# Samples that are kept of calls without a place in a schedule.
MOST_UNPLACED = 16


def kept(rows: Iterable[Sample]) -> tuple[Sample, ...]:
    """The samples that decide, in their order. Of a section that has more than enough these are
    kept: for every candidate the sample where it did worst (one that refused it is worst of all);
    then those with the lowest cosines, until there are `MOST_OF_SECTION`; then the next worst of
    any candidate that is in fewer than `FEWEST_SAMPLES` of them.

    So the least cosine of every candidate in every section is that of all samples, and what two
    samples measured stays measured in two. Means are those of the hardest samples.
    """
    held: dict[int | None, list[Sample]] = {}
    every = list(rows)
    for row in every:
        held.setdefault(None if row.at is None else section_of(row.at), []).append(row)
    chosen: set[int] = set()
    names = dict.fromkeys(name for row in every for name in row.errors)
    for section, members in held.items():
        most = MOST_UNPLACED if section is None else MOST_OF_SECTION
        if len(members) <= most:
            chosen |= {id(row) for row in members}
            continue
        ranked = {}
        for name in names:
            known = [row for row in members if name in row.errors or name in row.refused]
            ranked[name] = sorted(known, key=lambda row: _hardness(row, name))
        few = {id(known[0]): known[0] for known in ranked.values() if known}
        for row in sorted(members, key=_worst):
            if len(few) >= most:
                break
            few.setdefault(id(row), row)
        # A kernel is chosen on FEWEST_SAMPLES samples at least: a candidate keeps as many as it
        # has, up to that.
        for known in ranked.values():
            lacking = FEWEST_SAMPLES - sum(id(row) in few for row in known)
            rest = [row for row in known if id(row) not in few]
            few |= {id(row): row for row in rest[: max(0, lacking)]}
        chosen |= few.keys()
    return tuple(row for row in every if id(row) in chosen)


def _hardness(row: Sample, name: str) -> tuple[bool, float, str, int]:
    """Rank of a sample by one candidate: lowest first; one that refused it is the worst."""
    errors = row.errors.get(name)
    if errors is None:
        return False, -2.0, row.run, row.call
    return errors.finite, errors.worst.cosine, row.run, row.call


def _worst(row: Sample) -> tuple[float, str, int]:
    return min((e.worst.cosine for e in row.errors.values()), default=-2.0), row.run, row.call
