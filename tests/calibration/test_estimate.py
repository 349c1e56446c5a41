"""Candidates that some samples had no time for: they stay candidates, and never look better for
having been measured less.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.layers import calibration, errors, sample
from models.stacks import stack, tokens

import sagepatch
from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration import candidates
from sagepatch.calibration.estimate import FEWEST_SAMPLES, completed, eligible
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.sample import Sample
from sagepatch.calibration.table import LayerTable

FAST, OTHER, SAFE = "triton.sage2_8", "triton.sage2pp_8", "triton.sage1_b"
EVERY = (FAST, OTHER, SAFE)


def row(number: int, us_exact: float = 1000.0, **cosines: float) -> Sample:
    """A prompt's sample: candidates by their cosine, the others skipped for time."""
    named = {{"fast": FAST, "other": OTHER, "safe": SAFE}[key]: c for key, c in cosines.items()}
    us = {FAST: 500.0, OTHER: 400.0, SAFE: 700.0}
    made = sample(number, named, us=us, us_exact=us_exact, run=f"run {number}")
    return replace(made, skipped=tuple(name for name in EVERY if name not in named))


def layer(*rows: Sample) -> LayerTable:
    return LayerTable("a", "self", rows)


def worst(rows: tuple[Sample, ...], name: str) -> float:
    """1 - cosine."""
    return 1 - min(one.errors[name].worst.cosine for one in completed(rows, eligible(rows)))


# Once wrong: what two tables measured of different candidates gave exact attention.
def test_candidates_of_either_table_stay_candidates() -> None:
    one = calibration(layer(row(1, fast=0.9999), row(2, fast=0.9998)), runs=("run 1", "run 2"))
    two = calibration(layer(row(3, other=0.9997), row(4, other=0.9996)), runs=("run 3", "run 4"))
    for both in (one.merge(two), two.merge(one)):
        (merged,) = both.layers
        assert set(merged.names) == {FAST, OTHER}
        assert (merged.prompts(), merged.prompts(FAST), merged.prompts(OTHER)) == (4, 2, 2)
        assert set(merged.unmeasured) == {SAFE}
        # Nothing ties the two: each is taken to be as far off as the other where it was not seen.
        assert merged.candidates[FAST].cosine == pytest.approx(0.9996)
        assert merged.candidates[OTHER].cosine == pytest.approx(0.9996)
        (entry,) = both.plan(0.998).entries
        assert entry.variant == OTHER
        assert f"measured on fewer than all 4 prompts: {FAST} on 2, {OTHER} on 2" in entry.reason


def test_a_hard_prompt_that_only_the_other_met_counts_against_both() -> None:
    easy, hard = row(1, fast=0.9999), row(3, other=0.99)
    rows = (easy, row(2, fast=0.9999), hard, row(4, other=0.9999))
    entry = entry_at(layer(*rows), 0.998)
    assert entry.variant == SDPA.name
    assert f"{FAST}: cosine 0.99000 < 0.998 (head 0, call 3, not measured there)" in entry.reason


def test_what_was_worse_where_both_were_measured_is_so_elsewhere() -> None:
    # Ten times as far off as FAST in the first prompt, three times in the second.
    rows = (
        row(1, fast=1 - 1e-4, other=1 - 1e-3),
        row(2, fast=1 - 1e-4, other=1 - 3e-4),
        row(3, fast=1 - 4e-4),
    )
    assert worst(rows, OTHER) == pytest.approx(4e-3)
    assert worst(rows, FAST) == pytest.approx(4e-4)
    # Relative L1 by its own factor, not by that of the cosine.
    found = completed(rows, eligible(rows))[2].errors[OTHER]
    assert found.estimated
    assert found.rel_l1[0] == pytest.approx(math.sqrt(10) * math.sqrt(2 * 4e-4))


def test_a_kernel_is_taken_to_be_better_on_two_samples_only() -> None:
    both = {"fast": 1 - 1e-3, "other": 1 - 1e-4, "safe": 1 - 1e-5}
    once = (row(1, **both), row(2, safe=0.9999, other=0.9999), row(3, fast=1 - 5e-3))
    assert worst(once, SAFE) == pytest.approx(5e-3)
    twice = (row(1, **both), row(2, **both), row(3, fast=1 - 5e-3))
    assert worst(twice, SAFE) == pytest.approx(5e-5)
    assert worst(twice, OTHER) == pytest.approx(5e-4)
    # By the least of its leads.
    less = (row(1, **both), row(2, **{**both, "safe": 1 - 1e-4}), row(3, fast=1 - 5e-3))
    assert worst(less, SAFE) == pytest.approx(5e-4)


@given(
    st.lists(
        st.tuples(st.floats(1e-5, 0.5), st.floats(1e-5, 0.5), st.booleans()), min_size=2, max_size=9
    )
)
@settings(max_examples=200, deadline=None)
def test_the_kernel_measured_less_never_looks_better(prompts) -> None:
    rows = tuple(
        row(number, fast=1 - fast, **({"other": 1 - other} if seen else {}))
        for number, (fast, other, seen) in enumerate(prompts)
    )
    seen = [other for _, other, measured in prompts if measured]
    if len(seen) < min(FEWEST_SAMPLES, len(rows)):
        assert OTHER not in eligible(rows)
        return
    # Its lead is the least that was seen, and none on one sample.
    ratio = max(other / fast for fast, other, measured in prompts if measured)
    unseen = [ratio * fast for fast, _, measured in prompts if not measured]
    assert worst(rows, OTHER) == pytest.approx(min(2.0, max([*seen, *unseen])))


def test_one_sample_is_not_enough() -> None:
    rows = (row(1, fast=0.9999, other=0.99999), row(2, fast=0.9999))
    assert eligible(rows) == (FAST,)
    assert entry_at(layer(*rows), 0.998).variant == FAST


def test_what_a_sample_refused_for_cause_stays_refused() -> None:
    refused = replace(row(3, fast=0.9999), skipped=(SAFE,), refused=(OTHER,))
    rows = (row(1, fast=0.9999, other=0.9999), row(2, fast=0.9999, other=0.9999), refused)
    assert eligible(rows) == (FAST,)
    assert layer(*rows).unmeasured == (SAFE,)


def test_where_all_that_was_measured_failed_nothing_speaks_for_another() -> None:
    broken = replace(row(3), errors={FAST: replace(errors(-1.0), finite=False)})
    rows = (row(1, fast=0.9999, other=0.9999), row(2, fast=0.9999, other=0.9999), broken)
    (third,) = completed(rows, eligible(rows))[2:]
    assert not third.errors[OTHER].finite
    # One that holds speaks for it.
    held = replace(broken, errors={**broken.errors, SAFE: errors(0.9999)})
    rows = (*rows[:2], held, row(4, fast=0.9999, safe=0.9999))
    assert completed(rows, eligible(rows))[2].errors[OTHER].finite


def test_a_sample_of_nothing_counts_a_candidate_at_its_worst() -> None:
    rows = (row(1, fast=0.9999), row(2, fast=0.999), row(3))
    assert completed(rows, eligible(rows))[2].errors[FAST].worst.cosine == 0.999


def test_a_whole_table_stays_as_it_is() -> None:
    rows = tuple(row(n, fast=0.9999, other=0.999, safe=0.99999) for n in range(1, 5))
    assert completed(rows, eligible(rows)) == rows
    assert entry_at(layer(*rows), 0.998).reason.endswith("2.50x exact")


def test_each_part_of_the_schedule_judges_a_candidate_on_two_measurements() -> None:
    def at(step: int, number: int, **cosines: float) -> Sample:
        return replace(row(number, **cosines), step=step, steps=28)

    # OTHER was measured at both ends only, and is bad at the last.
    rows = (
        at(0, 1, fast=0.9999, other=0.9999),
        at(0, 2, fast=0.9999, other=0.9999),
        *(at(14, n, fast=0.9999) for n in (3, 4)),
        at(27, 5, fast=0.9999, other=0.9),
        at(27, 6, fast=0.9999),
    )
    entry = entry_at(layer(*rows), 0.998)
    assert entry.ranges[0].variant == OTHER
    assert entry.ranges[-1].variant == FAST
    # The middle: by estimate ten times and more as far off as FAST, as it was at the end.
    assert {one.variant for one in entry.ranges if one.start < 0.5 <= one.end} == {FAST}


def test_calibrations_that_tried_different_kernels_are_merged_into_one_plan(monkeypatch) -> None:
    model, x = stack(1), tokens()
    tables = []
    for recipes in (("sage2_8", "sage1_b"), ("sage2pp_8", "sage1_b")):
        monkeypatch.setattr(candidates, "EMULATED_RECIPES", recipes)
        with torch.no_grad():
            made = sagepatch.calibrate(model, run=lambda: (model(x), model(x)), emulate=True)
        tables.append(made)
    (merged,) = tables[0].merge(tables[1]).layers
    assert set(merged.names) == {f"emulated.{n}" for n in ("sage2_8", "sage2pp_8", "sage1_b")}
    assert merged.prompts() == merged.prompts("emulated.sage1_b") == 2
    assert merged.prompts("emulated.sage2_8") == 1
    both = [one.plan(0.99) for one in (tables[0].merge(tables[1]), tables[1].merge(tables[0]))]
    one, other = (plan.entries[0] for plan in both)
    assert one.variant == other.variant == "emulated.sage2pp_8"
    assert one.cosine == pytest.approx(other.cosine)
