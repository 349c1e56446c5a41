"""Entries of a plan from a layer's table and what was chosen for it, once or part by part; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.cells import Cell
from sagepatch.calibration.choose import Choice, Summary
from sagepatch.plan import PlanEntry, PlanRange

if TYPE_CHECKING:
    from sagepatch.calibration.table import LayerTable


def safest(found: Mapping[str, Summary], variants: Iterable[str]) -> str:
    """The most accurate of some kernels at a layer, exact attention before all."""

    def accuracy(name: str) -> tuple[bool, float]:
        return name == SDPA.name, found[name].cosine if name in found else -1.0

    return max(dict.fromkeys(variants), key=accuracy)


def entry_of(
    layer: LayerTable, choice: Choice, found: Mapping[str, Summary] | None = None
) -> PlanEntry:
    """The entry of a layer that runs one kernel throughout; `found` is `layer.candidates`."""
    shown = (layer.candidates if found is None else found).get(choice.variant)
    inputs = [row.statistics for row in layer.rows if row.statistics is not None]
    return PlanEntry(
        site=layer.site,
        kind=layer.kind,
        variant=choice.variant,
        numerics_version=BY_NAME[choice.variant].numerics_version,
        reason=choice.reason,
        samples=layer.samples,
        shapes=layer.shapes,
        dtype=layer.dtype,
        cosine=None if shown is None else shown.cosine,
        cosine_mean=None if shown is None else shown.cosine_mean,
        rel_l1=None if shown is None else _finite(shown.rel_l1),
        rmse=None if shown is None else _finite(shown.rmse),
        norm_ratio=None if shown is None else _finite(shown.norm_ratio),
        worst_head=None if shown is None else shown.worst_head,
        worst_call=None if shown is None else shown.worst_call,
        max_abs_v=_finite(layer.max_abs_v),
        us_exact=layer.us_exact,
        us_chosen=layer.us_exact if shown is None else shown.us,
        alternatives=_versions(choice.alternatives),
        k_offset=_finite(max((x for one in inputs for x in one.k_offset), default=None)),
        q_outlier=_finite(max((x for one in inputs for x in one.q_outlier), default=None)),
        p_entropy=_finite(min((x for one in inputs for x in one.p_entropy), default=None)),
    )


def ranged(
    layer: LayerTable,
    parts: Sequence[Cell],
    choices: Sequence[Choice],
    whole: Sequence[str],
    found: Mapping[str, Summary],
    unknown: str | None = None,
) -> PlanEntry:
    """The entry for a choice in each part: equal neighbours are one range, and one range is none.

    `whole` are the kernels that are accurate enough everywhere, best first, `found` is
    `layer.candidates`; `unknown` runs where the place of a call is not known, by default the most
    accurate of those chosen.
    """
    runs: list[list[int]] = []
    for place, choice in enumerate(choices):
        if runs and choices[runs[-1][-1]].variant == choice.variant:
            runs[-1].append(place)
        else:
            runs.append([place])
    kept = unknown or safest(found, [choice.variant for choice in choices])
    others = tuple(name for name in whole if name not in (kept, SDPA.name))
    if len(runs) == 1:
        return entry_of(layer, replace(_tightest(choices), alternatives=others), found)
    us = {SDPA.name: layer.us_exact, **{name: one.us for name, one in found.items()}}
    ranges = tuple(_range([parts[i] for i in run], [choices[i] for i in run], us) for run in runs)
    told = ", ".join(f"{part.variant} to {part.end:.3g}" for part in ranges)
    deciding = next((part.reason for part in ranges if part.variant == kept), None)
    why = f"because: {deciding}" if deciding else "where the place in it is unknown"
    reason = f"differs over the schedule: {told}; {kept} {why}"
    measured = [part for part in ranges if part.cosine is not None]
    worst = min(measured, key=lambda part: part.cosine or 0.0, default=None)
    own = [_own(part, choice) for part, choice in zip(parts, choices, strict=True)]
    seen = [one for one in own if one is not None]
    ratios = (one.norm_ratio for one in seen)
    samples = sum(one.samples for one in seen)
    mean = sum(one.cosine_mean * one.samples for one in seen) / samples if samples else None
    return replace(
        entry_of(layer, Choice(kept, reason, others), found),
        cosine=None if worst is None else worst.cosine,
        cosine_mean=mean,
        rel_l1=_finite(max((one.rel_l1 for one in seen), default=None)),
        rmse=_finite(max((one.rmse for one in seen), default=None)),
        norm_ratio=_finite(max(ratios, key=lambda ratio: abs(ratio - 1), default=None)),
        worst_head=None if worst is None else worst.worst_head,
        worst_call=None if worst is None else worst.worst_call,
        us_chosen=_mean_us(parts, choices, us),
        ranges=ranges,
    )


def _range(
    parts: Sequence[Cell], choices: Sequence[Choice], us: Mapping[str, float | None]
) -> PlanRange:
    """One range of equal choices."""
    name = choices[0].variant
    common = [
        one for one in choices[0].alternatives if all(one in c.alternatives for c in choices[1:])
    ]
    rows = tuple(row for part in parts for row in part.own)
    shown = Summary.of(name, rows) if rows and name != SDPA.name else None
    return PlanRange(
        start=parts[0].start,
        end=parts[-1].end,
        variant=name,
        numerics_version=BY_NAME[name].numerics_version,
        reason=_tightest(choices).reason,
        cosine=None if shown is None else shown.cosine,
        rel_l1=None if shown is None else _finite(shown.rel_l1),
        worst_head=None if shown is None else shown.worst_head,
        worst_call=None if shown is None else shown.worst_call,
        us_chosen=us[name],
        alternatives=_versions(common),
    )


def _tightest(choices: Sequence[Choice]) -> Choice:
    """The choice that left the fewest alternatives: its reason is the one that explains most."""
    return min(choices, key=lambda choice: len(choice.alternatives))


def _own(part: Cell, choice: Choice) -> Summary | None:
    """The errors of a choice on the samples taken in its part; None for exact attention."""
    if not part.own or choice.variant == SDPA.name:
        return None
    return Summary.of(choice.variant, part.own)


def _mean_us(
    parts: Sequence[Cell], choices: Sequence[Choice], us: Mapping[str, float | None]
) -> float | None:
    """Microseconds of one call, averaged over the steps of the schedule in these parts."""
    total = 0.0
    for part, choice in zip(parts, choices, strict=True):
        one = us[choice.variant]
        if one is None:
            return None
        total += one * part.share
    shares = sum(part.share for part in parts)
    return total / shares if shares else None


def _versions(names: Iterable[str]) -> dict[str, int]:
    return {name: BY_NAME[name].numerics_version for name in names}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: against an all-zero reference some errors are infinite."""
    return value if value is not None and math.isfinite(value) else None
