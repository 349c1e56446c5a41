"""Errors of candidates on samples that had no time for them, so that all of a layer's candidates
are judged on all of its samples. Pure.

The estimate follows from the candidates that were measured on the sample. Of each of them: in the
samples that measured it and the missing one, the latter was at most f times as far off, so here it
is taken to be f times as far off, too. The largest of these estimates counts. f below 1 (better)
needs two such samples; where there are none at all, f is 1. So a candidate's lead over another is
never more than the least that was seen side by side: having been measured on fewer prompts makes
none look better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.sample import FEWEST_SAMPLES, HeadErrors, Sample

# Errors below this are rounding: their ratio says nothing.
ROUNDING = 1e-6


def eligible(rows: Sequence[Sample]) -> tuple[str, ...]:
    """The candidates that may be chosen, in the order of the catalogue: none that a sample refused
    for cause, and none that too few samples measured.
    """
    refused = {name for row in rows for name in row.refused}
    counts: dict[str, int] = {}
    for row in rows:
        for name in row.errors:
            counts[name] = counts.get(name, 0) + 1
    fewest = min(FEWEST_SAMPLES, len(rows))
    found = {n for n, count in counts.items() if n not in refused and count >= fewest}
    known = [name for name in BY_NAME if name in found]
    return (*known, *sorted(found.difference(known)))


def completed(rows: Sequence[Sample], names: Sequence[str]) -> tuple[Sample, ...]:
    """The samples with errors of all these candidates, estimated where they were not measured."""
    if all(name in row.errors for row in rows for name in names):
        return tuple(rows)
    leads = _Leads(rows)
    found = []
    for row in rows:
        missing = {n: _estimated(n, row, rows, leads) for n in names if n not in row.errors}
        found.append(replace(row, errors={**row.errors, **missing}) if missing else row)
    return tuple(found)


class _Leads:
    """By measure, how many times as far off as another candidate one is taken to be."""

    def __init__(self, rows: Sequence[Sample]) -> None:
        # By sample, what was finite there, each measure at its worst head.
        self._far = [
            {name: _far(errors) for name, errors in row.errors.items() if errors.finite}
            for row in rows
        ]
        self._known: dict[tuple[str, str], tuple[float, ...] | None] = {}

    def factors(self, name: str, other: str) -> tuple[float, ...] | None:
        """One a measure; None where no sample has both."""
        if (name, other) not in self._known:
            both = [(far[name], far[other]) for far in self._far if name in far and other in far]
            self._known[name, other] = tuple(map(_factor, *_columns(both))) if both else None
        return self._known[name, other]


def _far(errors: HeadErrors) -> tuple[float, ...]:
    worst = errors.worst
    return 1 - worst.cosine, worst.rel_l1, worst.rmse, abs(worst.norm_ratio - 1)


def _columns(
    both: Sequence[tuple[tuple[float, ...], tuple[float, ...]]],
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Of each measure the numbers of one candidate, and of each those of the other."""
    mine, theirs = zip(*both, strict=True)
    return list(zip(*mine, strict=True)), list(zip(*theirs, strict=True))


def _factor(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as far off as the other a candidate is taken to be, by one measure."""
    ratios = [
        max(far, ROUNDING) / max(beside, ROUNDING)
        for far, beside in zip(mine, theirs, strict=True)
        if math.isfinite(far) and math.isfinite(beside)
    ]
    most = max(ratios, default=1.0)
    return most if len(ratios) >= FEWEST_SAMPLES else max(1.0, most)


def _estimated(name: str, row: Sample, rows: Sequence[Sample], leads: _Leads) -> HeadErrors:
    """What a candidate is taken to do on a sample that did not measure it."""
    known = {other: errors for other, errors in row.errors.items() if errors.finite}
    if not known:
        # Where all that was measured failed, nothing speaks for this one; where nothing was
        # measured at all, its worst elsewhere does.
        failed = next(iter(row.errors.values()), None) or _worst(name, rows)
        return replace(failed, us=None, host_us=None, estimated=True)
    factors = {other: leads.factors(name, other) for other in known}
    tied = {other: found for other, found in factors.items() if found is not None}
    by_other = tied or dict.fromkeys(known, (1.0,) * 4)
    scaled = [_scaled(known[other], found) for other, found in by_other.items()]
    cosine, rel_l1, rmse, norm = (
        tuple(map(max, zip(*heads, strict=True))) for heads in zip(*scaled, strict=True)
    )
    return HeadErrors(
        True,
        tuple(max(-1.0, 1 - one) for one in cosine),
        rel_l1,
        rmse,
        tuple(1 + one for one in norm),
        estimated=True,
    )


def _scaled(errors: HeadErrors, factors: Sequence[float]) -> list[tuple[float, ...]]:
    """How far off every head is, by measure, each times its factor."""
    off = (
        tuple(1 - one for one in errors.cosine),
        errors.rel_l1,
        errors.rmse,
        tuple(abs(one - 1) for one in errors.norm_ratio),
    )
    return [tuple(f * one for one in heads) for f, heads in zip(factors, off, strict=True)]


def _worst(name: str, rows: Sequence[Sample]) -> HeadErrors:
    measured = [row.errors[name] for row in rows if name in row.errors]
    return min(measured, key=lambda errors: (errors.finite, errors.worst.cosine))
