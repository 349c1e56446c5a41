"""Which kernel a layer gets: a pure function of its measurements, a threshold and the order of
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.remedies import gained
from sagepatch.calibration.sample import Sample
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import TIERS
from sagepatch.variant import Variant

FEWEST_SAMPLES = 2
# A quantised call costs the host some tens of microseconds more than torch's own, and times
# scatter: a kernel must win by this share of exact attention's time, and by so many a call.
LEAST_GAIN = 0.05
LEAST_GAIN_US = 20.0
# Calls that exact attention serves in less than this are left to it: on an idle GPU their times are
# the host's, which a quantised call takes more of.
SHORT_US = 75.0
UNSERVED = "no quantised kernel serves this layer here"
UNSHARED = "no kernel was measured in every sample"


@dataclass(frozen=True, slots=True)
class Summary:
    """One candidate over all samples of a layer, each number at its worst but for `cosine_mean`;
    `us` is the median of what was timed.

    `worst_call`, `worst_head` and `worst_place` say where the cosine was lowest.
    """

    variant: str
    finite: bool
    cosine: float
    cosine_mean: float
    rel_l1: float
    rmse: float
    norm_ratio: float
    worst_head: int
    worst_call: int
    samples: int
    us: float | None
    worst_place: str = ""

    @classmethod
    def of(cls, variant: str, samples: Sequence[Sample]) -> Summary:
        """Sum up one candidate over samples that all have it, each at its worst head."""
        rows = [sample.errors[variant] for sample in samples]
        worsts = [row.worst for row in rows]
        at = min(range(len(rows)), key=lambda i: (rows[i].finite, worsts[i].cosine))
        times = [row.us for row in rows if row.us is not None]
        return cls(
            variant,
            all(row.finite for row in rows),
            worsts[at].cosine,
            math.fsum(one.cosine for one in worsts) / len(rows),
            max(one.rel_l1 for one in worsts),
            max(one.rmse for one in worsts),
            max((one.norm_ratio for one in worsts), key=lambda ratio: abs(ratio - 1)),
            rows[at].worst_head,
            samples[at].call,
            len(rows),
            median_high(times) if times else None,
            samples[at].place,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a layer, the sentence that says why, and the other admissible ones, best
    first.
    """

    variant: str
    reason: str
    alternatives: tuple[str, ...] = ()


def pays(us: float, us_exact: float) -> bool:
    """Whether a kernel is so much faster than exact attention that a plan takes it; monotone.

    >>> pays(80.0, 100.0), pays(81.0, 100.0), pays(960.0, 1000.0), pays(10.0, 74.0)
    (True, False, False, False)
    """
    return us_exact >= SHORT_US and us <= us_exact - max(LEAST_GAIN * us_exact, LEAST_GAIN_US)


def exact_time(rows: Sequence[Sample]) -> float | None:
    """Median time of exact attention over some samples, None where nothing was timed."""
    times = [row.us_exact for row in rows if row.us_exact is not None]
    return median_high(times) if times else None


class Times:
    """How long each kernel takes on each kind of call of a layer: the median over all its samples
    of that kind, so that equal calls have equal times in every part of the schedule.
    """

    def __init__(self, rows: Sequence[Sample]) -> None:
        taken: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row.us_exact is not None:
                taken.setdefault((row.shape, SDPA.name), []).append(row.us_exact)
            for name, errors in row.errors.items():
                if errors.us is not None:
                    taken.setdefault((row.shape, name), []).append(errors.us)
        self._known = {key: median_high(times) for key, times in taken.items()}

    def us(self, rows: Sequence[Sample], name: str) -> float | None:
        """The median over some samples of a kernel's time on calls of their kinds."""
        kinds = ((row.shape, name) for row in rows)
        times = [self._known[kind] for kind in kinds if kind in self._known]
        return median_high(times) if times else None


def unseen(samples: int) -> str:
    """Why a layer with so few samples stays exact."""
    return f"only {samples} of {FEWEST_SAMPLES} samples seen: stays exact"


def check_bound(name: str, value: object) -> None:
    """Refuse a bound that is no number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidArgument(f"{name} is {value!r}, needs a number")


def error_bound(threshold: float) -> float:
    """The relative L1 and norm deviation that a cosine of `threshold` allows: sqrt(2 (1 -
    threshold)).
    """
    return math.sqrt(2 * max(0.0, 1 - threshold))


def refusal(summary: Summary, threshold: float) -> str | None:
    """Why a candidate is not admissible at `threshold`, None when it is; monotone."""
    if not summary.finite:
        return "not finite"
    where = f"head {summary.worst_head}, {_place(summary)}"
    return too_far(summary.cosine, summary.rel_l1, summary.norm_ratio, threshold, where)


def too_far(
    cosine: float, rel_l1: float, norm_ratio: float, threshold: float, where: str
) -> str | None:
    """Which bound of `threshold` these errors break, None for none; `where` tells of the cosine."""
    if threshold <= 0:
        return None
    bound = error_bound(threshold)
    if not cosine >= threshold:
        return f"cosine {cosine:.5f} < {threshold:g} ({where})"
    if not rel_l1 <= bound:
        return f"relative L1 {rel_l1:.4f} > {bound:.4f}"
    if not abs(norm_ratio - 1) <= bound:
        return f"norm ratio {norm_ratio:.4f}, off by more than {bound:.4f}"
    return None


def choose(
    summaries: Mapping[str, Summary],
    *,
    samples: int,
    threshold: float,
    us_exact: float | None,
) -> Choice:
    """The fastest admissible candidate, exact attention included.

    Where times were measured the fastest measured one wins if it `pays`; where none were, the
    ranking is fast, safe, exact, and within a tier the order of the catalogue.
    """
    if samples < FEWEST_SAMPLES:
        return Choice(SDPA.name, unseen(samples))
    if not summaries:
        return Choice(SDPA.name, UNSERVED)
    refused = {name: refusal(summary, threshold) for name, summary in summaries.items()}
    admissible = [summary for name, summary in summaries.items() if refused[name] is None]
    if not admissible:
        listed = "; ".join(f"{name}: {why}" for name, why in refused.items())
        return Choice(SDPA.name, f"no kernel is accurate enough: {listed}")
    ranked = sorted(admissible, key=lambda s: _rank(BY_NAME[s.variant]))
    if us_exact is None:
        best, *others = ranked
        why = _why_admitted(best, refused, "first by tier, nothing timed")
        return Choice(best.variant, why, tuple(other.variant for other in others))
    timed = [(summary.us, summary) for summary in ranked if summary.us is not None]
    us, fastest = min(timed, key=lambda pair: pair[0], default=(None, None))
    if us is None or fastest is None or not pays(us, us_exact):
        shown = "none was timed" if fastest is None else f"{fastest.variant} takes {us:.0f} us"
        short = "too short a call" if us_exact < SHORT_US else "too little is gained"
        won = "exact is fastest" if us is None or us >= us_exact else short
        why = f"{won}: {us_exact:.0f} us, {shown}"
        return Choice(SDPA.name, why, tuple(summary.variant for summary in ranked))
    why = _why_admitted(fastest, refused, f"{us_exact / us:.2f}x exact")
    others = [summary for summary in ranked if summary is not fastest]
    return Choice(fastest.variant, why, tuple(other.variant for other in others))


def _why_admitted(best: Summary, refused: Mapping[str, str | None], merit: str) -> str:
    chosen = BY_NAME[best.variant]
    better = _rank(chosen)
    passed_over = [
        (name, why)
        for name, why in refused.items()
        if why is not None and _rank(BY_NAME[name]) < better
    ]
    where = f"cosine {best.cosine:.5f} in the worst head ({_place(best)})"
    told = [f"{name} refused: {why}" for name, why in passed_over]
    if passed_over:
        remedies = gained(BY_NAME[passed_over[0][0]].recipe, chosen.recipe)
        told += [f"remedy: {', '.join(remedies)}"] if remedies else []
    return "; ".join([f"{where}, {merit}", *told])


def _place(summary: Summary) -> str:
    return summary.worst_place or f"call {summary.worst_call}"


def _rank(variant: Variant) -> tuple[int, int]:
    return TIERS.index(variant.tier), list(BY_NAME).index(variant.name)
