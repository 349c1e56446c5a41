"""Sections of a schedule: fractions that fit any number of steps, and which steps are measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagepatch.calibration.sections import (
    COUNT,
    EDGES,
    bounds,
    sampled_steps,
    section_of,
)
from sagepatch.schedule import fraction


def test_the_sections_follow_one_another_from_0_to_1() -> None:
    assert [bounds(section)[0] for section in range(COUNT)] == list(EDGES)
    assert [bounds(section)[1] for section in range(COUNT)] == [*EDGES[1:], 1.0]


@given(st.integers(1, 2000))
def test_the_first_and_the_last_step_are_alone_with_their_neighbours_at_most(steps: int) -> None:
    sections = [section_of(fraction(step, steps)) for step in range(steps)]
    assert sections == sorted(sections)
    assert sections[0] == 0
    assert steps == 1 or sections[-1] == COUNT - 1
    # Never more than one step in 32 (and the first) in the narrow ones.
    assert sections.count(0) <= 1 + steps // 32
    assert sections.count(COUNT - 1) <= 1 + steps // 32


@given(st.integers(1, 2000))
def test_one_step_of_each_section_is_measured_the_first_and_the_last_among_them(steps) -> None:
    chosen = sampled_steps(steps)
    assert {chosen[0], chosen[-1]} == {0, steps - 1}
    sections = [section_of(fraction(step, steps)) for step in chosen]
    assert len(set(sections)) == len(sections)
    every = {section_of(fraction(step, steps)) for step in range(steps)}
    assert set(sections) == every


@pytest.mark.parametrize("steps", [4, 8, 28, 50])
def test_usual_step_counts_are_measured_in_a_few_steps(steps: int) -> None:
    assert len(sampled_steps(steps)) == min(steps, {8: 6}.get(steps, 8))
