"""Sentences and sums over all rows of a report: how many, why exact, time in attention; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.dispatch import by_kind

if TYPE_CHECKING:
    from sagepatch.report.model import LayerRow

# What stands before the reason proper where a plan was made earlier or elsewhere.
_PREFIXES = ("kept from an earlier run: ", "timed again on this GPU: ")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many layers were found, are patched and by tier, were left alone, lost their patch."""

    found: int
    patched: int
    fast: int
    safe: int
    exact: int
    left: int
    lost: int

    @classmethod
    def of(cls, rows: Sequence[LayerRow], left: int) -> Counts:
        """Count; a layer that lost its patch is found but no longer patched."""
        here = [row for row in rows if row.replaced_by is None]
        tiers = Counter(row.tier for row in here)
        return cls(
            found=len(rows) + left,
            patched=len(here),
            fast=tiers["fast"],
            safe=tiers["safe"],
            exact=tiers["exact"],
            left=left,
            lost=len(rows) - len(here),
        )


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Time in attention of the layers that were timed, for their calls so far that are like the
    timed ones: with exact attention throughout, and with the kernels now chosen. Microseconds.

    `run_seconds` is the duration of the run that made these calls, `exact_run_seconds` that of the
    same run with exact attention, None where nobody told.
    """

    layers: int
    calls: int
    us_exact: float
    us_chosen: float
    run_seconds: float | None = None
    exact_run_seconds: float | None = None

    @classmethod
    def of(
        cls,
        rows: Iterable[LayerRow],
        run_seconds: float | None = None,
        exact_run_seconds: float | None = None,
    ) -> AttentionTime | None:
        """Sum up; None where no call was like a timed one."""
        layers = calls = 0
        exact = chosen = 0.0
        for row in rows:
            if row.us_exact is None or row.us_chosen is None or row.calls_as_measured == 0:
                continue
            layers += 1
            calls += row.calls_as_measured
            exact += row.us_exact * row.calls_as_measured
            chosen += row.us_chosen * row.calls_as_measured
        if not (exact and chosen):
            return None
        return cls(layers, calls, exact, chosen, run_seconds, exact_run_seconds)

    @property
    def gain(self) -> float:
        """How many times as fast attention is, exact attention being 1."""
        return self.us_exact / self.us_chosen

    @property
    def share(self) -> float | None:
        """Part of the run that was attention, 0 to 1; None where the run's time is unknown or too
        short to hold these calls.
        """
        if self.run_seconds is None or self.us_chosen > self.run_seconds * 1e6:
            return None
        return self.us_chosen / (self.run_seconds * 1e6)

    @property
    def run_gain(self) -> float | None:
        """How many times as fast the whole run is as one with exact attention, by these times."""
        if self.share is None or self.run_seconds is None:
            return None
        run_us = self.run_seconds * 1e6
        return (run_us - self.us_chosen + self.us_exact) / run_us

    @property
    def measured_run_gain(self) -> float | None:
        """How many times as fast the whole run was as the one with exact attention, by the clock;
        None where one of them was not timed.
        """
        if self.run_seconds is None or self.exact_run_seconds is None:
            return None
        return self.exact_run_seconds / self.run_seconds

    def sentence(self) -> str:
        """One line: what attention took, what it gains, and what that means for the whole run."""
        text = (
            f"Attention of {counted(self.layers, 'timed layer')}: {_time(self.us_exact)} exact, "
            f"{_time(self.us_chosen)} with these kernels ({self.gain:.2f}x)"
        )
        if self.share is not None and self.run_gain is not None:
            text += (
                f"; that is {self.share:.0%} of the run, "
                f"which is {self.run_gain:.2f}x as fast as with exact attention"
            )
            if self.measured_run_gain is not None:
                text += f" by these times, and {self.measured_run_gain:.2f}x by the clock"
        return text + "."


def shares(rows: Sequence[LayerRow]) -> list[float | None]:
    """Each layer's part of the time in attention with the kernels now chosen, 0 to 1; None where
    no call was like a timed one.
    """
    times = [
        row.us_chosen * row.calls_as_measured
        if row.us_exact is not None and row.us_chosen is not None and row.calls_as_measured
        else None
        for row in rows
    ]
    total = sum(time for time in times if time is not None)
    return [time / total if time is not None and total else None for time in times]


def headline(model: str, counts: Counts, in_force: bool = True) -> str:
    """One sentence: how many layers were found and what they run, or ran while the patch was in
    force.
    """
    shares = f"{counts.fast} fast, {counts.safe} safe, {counts.exact} exact"
    past = "" if in_force else "taken back, nothing of this patch is in force; while it was, "
    text = (
        f"{model}: {past}{counts.found} attention layers found, {counts.patched} patched ({shares})"
    )
    if counts.left:
        text += f", {counts.left} left alone"
    if counts.lost:
        text += f"; {counts.lost} no longer patched, apply again to repair"
    return text


def why_exact(rows: Iterable[LayerRow]) -> str | None:
    """Why layers run exact attention, the most frequent reasons first; None where none does."""
    here = [row for row in rows if row.replaced_by is None]
    exact = [row for row in here if row.tier == "exact"]
    if not exact:
        return None
    reasons = Counter(first_clause(row.reason) for row in exact)
    shown = [
        f"{reason} ({count})" if len(reasons) > 1 else reason
        for reason, count in reasons.most_common(4)
    ]
    if len(reasons) > 4:
        shown.append(f"{len(reasons) - 4} more reasons")
    whose = "Every layer runs" if len(exact) == len(here) else f"{counted(len(exact), 'layer')} run"
    if len(exact) == 1 < len(here):
        whose += "s"
    return f"{whose} exact attention: {', '.join(shown)}."


def first_clause(reason: str) -> str:
    """The kind of a reason, without the numbers that differ from layer to layer."""
    for prefix in _PREFIXES:
        reason = reason.removeprefix(prefix)
    if reason.startswith(("demoted: ", "asked: ")):
        return reason
    return reason.partition(": ")[0].partition("; ")[0] or "no reason was kept"


def condensed(refusals: str) -> str:
    """A long list "kernel: why; kernel: why; ..." with kernels of one toolchain and reason counted;
    any other text as it is.
    """
    pairs = [part.partition(": ")[::2] for part in refusals.split("; ")]
    if len(pairs) < 3 or any(name not in BY_NAME for name, _ in pairs):
        return refusals
    listed = "; ".join(by_kind((BY_NAME[name], why) for name, why in pairs))
    return f"no kernel serves its calls: {listed}"


def grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(name, text) pairs as (text, names), in the order of first mention."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        found.setdefault(text, []).append(name)
    return list(found.items())


def counted(number: int, noun: str) -> str:
    """ "1 call", "2 calls"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"
