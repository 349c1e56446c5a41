"""The sections of a denoising schedule that a plan tells apart, and which steps stand for them.

Places are fractions: 0 in the first step, 1 in the last, so a plan fits any number of steps.
"""

from __future__ import annotations

from bisect import bisect_right

from sagepatch.schedule import fraction

# Narrow at both ends, where people find by hand that exact attention helps (first and last steps).
# The first section starts at 0; the last one holds 1.
EDGES = (0.0, 1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
COUNT = len(EDGES)


def section_of(at: float) -> int:
    """The section that holds a place from 0 to 1; an edge belongs to the section it starts.

    >>> section_of(0.0), section_of(1 / 32), section_of(1.0)
    (0, 1, 7)
    """
    return max(0, bisect_right(EDGES, at) - 1)


def bounds(section: int) -> tuple[float, float]:
    """Where a section starts and ends."""
    return EDGES[section], EDGES[section + 1] if section + 1 < COUNT else 1.0


def sampled_steps(steps: int) -> tuple[int, ...]:
    """The steps that are measured, at most one a section: the first, the last, and the one nearest
    the middle of each section between.

    >>> sampled_steps(50), sampled_steps(4)
    ((0, 4, 9, 18, 31, 40, 45, 49), (0, 1, 2, 3))
    """
    held: dict[int, list[int]] = {}
    for step in range(steps):
        held.setdefault(section_of(fraction(step, steps)), []).append(step)
    chosen = {0, max(0, steps - 1)}
    for section, members in held.items():
        if 0 < section < COUNT - 1:
            middle = sum(bounds(section)) / 2
            chosen.add(min(members, key=lambda step: abs(fraction(step, steps) - middle)))
    return tuple(sorted(chosen))
