"""Samples that are kept: a bounded number, the deciding ones always."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from models.layers import sample

from sagepatch.calibration.keeping import MOST_OF_SECTION, MOST_UNPLACED, kept
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.sections import COUNT, sampled_steps
from sagepatch.calibration.table import LayerTable

NAMES = ("triton.sage2_8", "triton.sage1_vb", "triton.sage1_b")


def rows(chance: random.Random, count: int, placed: bool):
    steps = sampled_steps(28)
    return [
        sample(
            number,
            {name: 1 - 10 ** chance.uniform(-5, -1) for name in NAMES},
            (chance.choice(steps), 28) if placed else None,
            run=str(number % 7),
        )
        for number in range(1, count + 1)
    ]


# case 58
@given(st.integers(0, 10**6), st.integers(0, 150), st.booleans())
@settings(max_examples=40, deadline=None)
def test_few_are_kept_and_decide_as_all_do(seed: int, count: int, placed: bool) -> None:
    every = rows(random.Random(seed), count, placed)
    few = kept(every)
    assert len(few) <= (MOST_OF_SECTION * COUNT if placed else MOST_UNPLACED)
    assert list(few) == [row for row in every if row in few]
    assert kept(few) == few
    for threshold in (0.9, 0.99, 0.998, 0.9999):
        a = entry_at(LayerTable("a", "self", tuple(every)), threshold)
        b = entry_at(LayerTable("a", "self", few), threshold)
        assert (a.variant, a.cosine, [p.variant for p in a.ranges]) == (
            b.variant,
            b.cosine,
            [p.variant for p in b.ranges],
        )


def test_one_at_a_time_keeps_what_all_at_once_keep() -> None:
    every = rows(random.Random(3), 90, True)
    held = ()
    for row in every:
        held = kept([*held, row])
    assert {min(row.errors[name].cosine) for row in held for name in NAMES} >= {
        min(min(row.errors[name].cosine) for row in every) for name in NAMES
    }


def test_a_sample_that_refused_a_candidate_is_kept() -> None:
    every = rows(random.Random(4), 40, False)
    kept_errors = {name: every[17].errors[name] for name in NAMES[:2]}
    lacks = replace(every[17], errors=kept_errors, refused=NAMES[2:])
    every[17] = lacks
    assert lacks in kept(every)
    assert LayerTable("a", "self", kept(every)).names == NAMES[:2]
