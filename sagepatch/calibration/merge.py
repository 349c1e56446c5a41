"""Calibrations of one model made in several processes as one: the worst error of all counts.

Pure but for `gathered`, which lets the processes of a `torch.distributed` group exchange theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median_high
from typing import TYPE_CHECKING

import torch.distributed as dist

from sagepatch.calibration.choose import Summary
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


def merged(calibrations: Sequence[Calibration]) -> Calibration:
    """One table of several processes' measurements, as if one process had seen all samples.

    Errors are the worst of all, mean cosines are weighted by samples, times are medians (the upper
    one of two). A candidate that could not serve every sample everywhere is left out.

    Raises `InvalidArgument` where the models, GPUs, versions or `emulate` differ: accuracies could
    be merged, times could not.
    """
    first = calibrations[0]
    for name, words in _SHARED.items():
        found = list(dict.fromkeys(str(getattr(one, name)) for one in calibrations))
        if len(found) > 1:
            raise InvalidArgument(
                f"calibrations of different {words} cannot be merged: {', '.join(found)}"
            )
    rows = zip(*(one.layers for one in calibrations), strict=True)
    return replace(first, layers=tuple(_layer(row) for row in rows))


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
    """One layer of every process; a process that never sampled it says nothing about candidates."""
    seen = [table for table in tables if table.samples] or list(tables[:1])
    if len(seen) == 1:
        return seen[0]
    names = [name for name in seen[0].candidates if all(name in one.candidates for one in seen)]
    return replace(
        seen[0],
        samples=sum(one.samples for one in seen),
        shapes=tuple(dict.fromkeys(shape for one in seen for shape in one.shapes)),
        us_exact=_median([one.us_exact for one in seen]),
        max_abs_v=max((one.max_abs_v for one in seen if one.max_abs_v is not None), default=None),
        candidates={name: _summary([one.candidates[name] for one in seen]) for name in names},
    )


def _summary(parts: Sequence[Summary]) -> Summary:
    worst = min(parts, key=lambda part: (part.finite, part.cosine))
    weights = [part.samples for part in parts]
    return replace(
        worst,
        cosine_mean=fmean([part.cosine_mean for part in parts], weights),
        rel_l1=max(part.rel_l1 for part in parts),
        rmse=max(part.rmse for part in parts),
        norm_ratio=max((part.norm_ratio for part in parts), key=lambda ratio: abs(ratio - 1)),
        samples=sum(weights),
        us=_median([part.us for part in parts]),
    )


def _median(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return median_high(known) if known else None
