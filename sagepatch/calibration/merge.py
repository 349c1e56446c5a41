"""Calibrations of one model made in several processes as one table of all samples.

Pure but for `gathered`, which lets the processes of a `torch.distributed` group exchange theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from sagepatch.calibration.keeping import kept
from sagepatch.calibration.sample import HeadErrors, Sample
from sagepatch.errors import InvalidArgument

if TYPE_CHECKING:
    from sagepatch.calibration.table import Calibration, LayerTable

# What must be the same for two tables to speak of the same thing, and how an error calls it.
_SHARED = {
    "fingerprint": "models",
    "emulated": "settings of emulate",
    "gpu": "GPUs",
    "versions": "versions",
}
# How many layers an error names.
MOST_NAMED = 4


def merged(calibrations: Sequence[Calibration]) -> Calibration:
    """One table of several processes' measurements, as if one process had seen all samples.

    They may have measured different candidates: each is judged on all samples, by estimate where
    it was not measured (`calibration.estimate`). One that a sample refused for cause in any table
    stays refused.

    Raises `InvalidArgument` where the models, GPUs, versions or `emulate` differ: accuracies could
    be merged, times could not.
    """
    first = calibrations[0]
    check_alike(calibrations)
    rows = zip(*(one.layers for one in calibrations), strict=True)
    return replace(
        first,
        layers=tuple(_layer(row) for row in rows),
        runs=tuple(dict.fromkeys(run for one in calibrations for run in one.runs)),
        run_seconds=sum(one.run_seconds for one in calibrations),
        measuring_seconds=sum(one.measuring_seconds for one in calibrations),
        preparing_seconds=sum(one.preparing_seconds for one in calibrations),
        stale=tuple(dict.fromkeys(told for one in calibrations for told in one.stale)),
    )


def check_alike(calibrations: Sequence[Calibration]) -> None:
    """Raise `InvalidArgument` where these tables do not speak of the same thing."""
    for name, words in _SHARED.items():
        found = list(dict.fromkeys(str(getattr(one, name)) for one in calibrations))
        if len(found) > 1:
            raise InvalidArgument(
                f"calibrations of different {words} cannot be merged: {', '.join(found)}"
            )
    sites = [tuple(layer.site for layer in one.layers) for one in calibrations]
    if len(set(sites)) > 1:
        missing = sorted(set().union(*sites) - set(sites[0]).intersection(*sites))
        numbers = ", ".join(map(str, map(len, sites)))
        which = f"not in all: {', '.join(missing[:MOST_NAMED])}" if missing else "in another order"
        raise InvalidArgument(
            f"calibrations of different layers cannot be merged: {numbers} layers, {which}; "
            "calibrate them with the same layers patched"
        )


def gathered(calibration: Calibration) -> Calibration:
    """The merged tables of every process of the default group, the same on each of them.

    Every process must call it. Raises `InvalidArgument` where no group was set up.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "torch.distributed is not set up, so there is nothing to gather from: "
            "start the script with torchrun or accelerate launch, or use merge"
        )
    found: list[Calibration | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, calibration)
    return merged([one for one in found if one is not None])


def _layer(tables: Sequence[LayerTable]) -> LayerTable:
    """One layer of every process; a sample that two of them hold (a table taken up again, or one
    prompt of which each process sees some heads) counts once, at its worse.
    """
    rows: dict[tuple[object, ...], Sample] = {}
    for row in (row for table in tables for row in table.rows):
        # Nobody can tell whether two runs without a name are the same: all of them count.
        # A prompt may have run with other steps or another size elsewhere: those calls are others.
        where = row.run, row.call, row.step, row.steps, row.shape, row.dtype
        key = where if row.run else (len(rows),)
        rows[key] = _both(rows[key], row) if key in rows else row
    # What was tried at the worst sample of all.
    tried = [table.remedies for table in tables if table.remedies]
    worst = min(tried, key=lambda one: one[0].cosine, default=())
    runs: dict[str, list[str]] = {}
    for table in tables:
        for name, those in table.runs.items():
            known = runs.setdefault(name, [])
            known += [run for run in those if not run or run not in known]
    found = {name: tuple(those) for name, those in runs.items()}
    spoilt = sum(table.spoilt for table in tables)
    return replace(tables[0], rows=kept(rows.values()), remedies=worst, runs=found, spoilt=spoilt)


def _both(one: Sample, other: Sample) -> Sample:
    """Two measurements of one call as one: each candidate at its worse."""
    errors: dict[str, HeadErrors] = dict(one.errors)
    for name, theirs in other.errors.items():
        both = (errors.get(name, theirs), theirs)
        errors[name] = min(both, key=lambda found: (found.finite, found.worst.cosine))
    skipped = dict.fromkeys((*one.skipped, *other.skipped))
    return replace(
        other,
        errors=errors,
        skipped=tuple(name for name in skipped if name not in errors),
        refused=tuple(dict.fromkeys((*one.refused, *other.refused))),
    )
