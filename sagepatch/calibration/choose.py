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
from sagepatch.calibration.sample import FEWEST_SAMPLES, Sample
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import TIERS
from sagepatch.variant import Variant

# Times scatter: a kernel must win by this share of exact attention's time.
LEAST_GAIN = 0.05
UNSERVED = "no quantised kernel serves this layer here"
SPOILT = "inputs of this layer were not finite"
UNSHARED = f"no kernel was measured in {FEWEST_SAMPLES} samples"


@dataclass(frozen=True, slots=True)
class Summary:
    """One candidate over all samples of a layer, each number at its worst but for `cosine_mean`;
    `us` is the median of what was timed.

    `worst_call`, `worst_head` and `worst_place` say where the cosine was lowest. `by_host`: `us` is
    what the host takes, longer than the GPU.
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
    by_host: bool = False

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
            samples[at].place + (", not measured there" if rows[at].estimated else ""),
            any(row.us is not None and row.us == row.host_us for row in rows),
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

    >>> pays(95.0, 100.0), pays(96.0, 100.0)
    (True, False)
    """
    return us <= us_exact - LEAST_GAIN * us_exact


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


def unseen(samples: int, spoilt: int = 0) -> str:
    """Why a layer with so few samples stays exact; `spoilt` calls were none, as their exact output
    was not finite.
    """
    if spoilt and not samples:
        return f"{SPOILT}: stays exact"
    more = f", {SPOILT} in others" if spoilt else ""
    return f"only {samples} of {FEWEST_SAMPLES} samples seen{more}: stays exact"


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
    spoilt: int = 0,
) -> Choice:
    """The fastest admissible candidate, exact attention included.

    Where times were measured the fastest measured one wins if it `pays`; where none were, the
    ranking is fast, safe, exact, and within a tier the order of the catalogue. `spoilt` is told of
    where there are too few samples (`unseen`).
    """
    if samples < FEWEST_SAMPLES:
        return Choice(SDPA.name, unseen(samples, spoilt))
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
        shown += " of the host" if fastest is not None and fastest.by_host else ""
        won = "exact is fastest" if us is None or us >= us_exact else "too little is gained"
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
