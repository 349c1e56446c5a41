"""Plans whose layers run different kernels in different parts of the schedule."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.layers import calibration, sample

from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.cells import cells
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.sample import Sample
from sagepatch.calibration.sections import sampled_steps
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.plan import Plan
from sagepatch.schedule import fraction

FAST, SAFE = "triton.sage2_8", "triton.sage1_b"
US = {FAST: 50.0, SAFE: 80.0}


def steps(cosines: dict[int, float], of: int = 50, *, run: str = "", safe: float = 0.9999):
    """Samples of one run, by step: the fast kernel's cosine."""
    return tuple(
        sample(step + 1, {FAST: cosine, SAFE: safe}, (step, of), us=US, us_exact=100.0, run=run)
        for step, cosine in cosines.items()
    )


def fifty_steps(*, bad: tuple[int, ...] = (), run: str = "") -> tuple[Sample, ...]:
    """One run of 50 steps, measured where such runs are; a fast kernel serves all steps well but
    the `bad` ones.
    """
    return steps({s: 0.99 if s in bad else 0.9995 for s in sampled_steps(50)}, 50, run=run)


def ran(entry, of: int) -> list[str]:
    """What each step of a run of `of` steps runs."""
    return [(entry.range_at(fraction(step, of)) or entry).variant for step in range(of)]


def test_a_layer_that_is_well_throughout_runs_one_kernel() -> None:
    entry = entry_at(LayerTable("a", "self", fifty_steps()), 0.998)
    assert (entry.variant, entry.ranges) == (FAST, ())
    assert entry.alternatives == {SAFE: 1}
    assert (entry.samples, entry.us_chosen) == (8, 50.0)


# case 31
@pytest.mark.parametrize("of", [12, 28, 50, 100])
def test_a_bad_last_step_is_pinned_for_any_number_of_steps(of: int) -> None:
    rows = (*fifty_steps(bad=(49,), run="a"), *fifty_steps(bad=(49,), run="b"))
    entry = entry_at(LayerTable("a", "self", rows), 0.998)
    assert [part.variant for part in entry.ranges] == [FAST, SAFE]
    assert entry.ranges[0].end == entry.ranges[1].start == 31 / 32
    names = ran(entry, of)
    assert names[-1] == SAFE
    assert set(names[: of - 1 - of // 32]) == {FAST}
    # Where the step is unknown.
    assert entry.variant == SAFE
    assert f"{FAST} to 0.969, {SAFE} to 1" in entry.reason
    assert "cosine 0.99000 < 0.998 (head 0, call 50 (step 50 of 50))" in entry.reason


def test_a_part_seen_once_is_judged_with_its_neighbours() -> None:
    entry = entry_at(LayerTable("a", "self", fifty_steps(bad=(0,))), 0.998)
    assert [(part.variant, part.end) for part in entry.ranges] == [(SAFE, 1 / 8), (FAST, 1.0)]
    twice = (*fifty_steps(bad=(0,), run="a"), *fifty_steps(run="b"))
    entry = entry_at(LayerTable("a", "self", twice), 0.998)
    assert [(part.variant, part.end) for part in entry.ranges] == [(SAFE, 1 / 32), (FAST, 1.0)]


def test_a_part_without_samples_is_judged_by_both_neighbours() -> None:
    rows = steps({0: 0.9995, 1: 0.9995, 2: 0.99, 3: 0.9995}, 4)
    entry = entry_at(LayerTable("a", "self", rows), 0.998)
    assert [part.variant for part in entry.ranges] == [FAST, SAFE]
    # Step 2 of 4 is in (1/2, 3/4); its neighbours were seen once.
    assert entry.ranges[0].end == 1 / 4


def test_a_layer_seen_in_a_part_of_the_schedule_only_has_no_gaps() -> None:
    late = [step for step in sampled_steps(50) if step > 25]
    entry = entry_at(LayerTable("a", "self", steps({s: 0.9995 for s in late})), 0.998)
    assert (entry.variant, entry.ranges) == (FAST, ())
    found = cells(steps({s: 0.9995 for s in late}))
    assert (found[0].start, found[-1].end) == (0.0, 1.0)
    assert sum(cell.share for cell in found) == pytest.approx(25 / 50, abs=0.021)


def test_shares_add_up_to_one_for_a_layer_of_every_step() -> None:
    for of in (1, 2, 4, 8, 28, 50):
        found = cells(steps({s: 0.9995 for s in sampled_steps(of)}, of))
        assert sum(cell.share for cell in found) == pytest.approx(1)
        assert found[0].start == 0
        assert found[-1].end == 1
        assert all(a.end == b.start for a, b in itertools.pairwise(found))


def test_samples_without_a_place_count_in_every_part() -> None:
    lost = sample(99, {FAST: 0.99, SAFE: 0.9999}, us=US, us_exact=100.0)
    entry = entry_at(LayerTable("a", "self", (*fifty_steps(), lost)), 0.998)
    assert (entry.variant, entry.ranges) == (SAFE, ())


def test_calls_of_unknown_place_get_a_kernel_that_is_accurate_enough_everywhere() -> None:
    # The fast kernel serves the first half alone, the safe one the second half alone.
    rows = []
    for run in ("a", "b"):
        for s in sampled_steps(28):
            fast, safe = (0.999, 0.997) if s < 14 else (0.996, 0.9999)
            rows += steps({s: fast}, 28, run=run, safe=safe)
    layer = LayerTable("layer", "self", tuple(rows))
    entry = entry_at(layer, 0.998)
    assert {part.variant for part in entry.ranges} == {FAST, SAFE}
    assert entry.variant == SDPA.name
    assert "where the place in it is unknown" in entry.reason
    assert entry_at(layer, 0.998, by_step=False).variant == SDPA.name


def test_one_kernel_for_all_steps_on_request() -> None:
    made = calibration(LayerTable("a", "self", fifty_steps(bad=(0,))))
    assert made.plan().entries[0].ranges
    (entry,) = made.plan(by_step=False).entries
    assert (entry.variant, entry.ranges) == (SAFE, ())


def test_exact_attention_where_nothing_else_is_accurate() -> None:
    rows = tuple(
        replace(row, errors={FAST: row.errors[FAST]}) for row in fifty_steps(bad=(0,), run="a")
    )
    twice = (*rows, *(replace(row, run="b") for row in rows))
    entry = entry_at(LayerTable("a", "self", twice), 0.998)
    assert [part.variant for part in entry.ranges] == [SDPA.name, FAST]
    assert entry.variant == SDPA.name
    assert entry.cosine == 0.9995
    # Steps 1 and 2 of 50 are exact.
    assert entry.us_chosen == pytest.approx((2 * 100 + 48 * 50) / 50)


def test_a_budget_spends_the_error_on_the_steps_that_can_bear_it() -> None:
    rows = (*fifty_steps(bad=(0, 49), run="a"), *fifty_steps(bad=(0, 49), run="b"))
    made = calibration(LayerTable("a", "self", rows))
    (none,) = made.plan(budget=0.0).entries
    assert (none.variant, none.ranges) == (SDPA.name, ())
    (some,) = made.plan(budget=0.04).entries
    assert [part.variant for part in some.ranges] == [SAFE, FAST, SAFE]
    (loose,) = made.plan(budget=1.0).entries
    assert (loose.variant, loose.ranges) == (FAST, ())
    assert "budget 0.04: the output is predicted to be off by" in some.reason
    (fast,) = made.plan(time_us=1).entries
    assert fast.variant == FAST


def test_a_plan_with_ranges_is_a_file(tmp_path) -> None:
    plan = calibration(LayerTable("a", "self", fifty_steps(bad=(0,)))).plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def random_table(chance: random.Random, sites: int, candidates: int, of: int, every: bool):
    """A table of random errors and times; `every`: all steps were measured."""
    names = [f"triton.{n}" for n in ("sage2_8", "sage2pp_8", "sage1_vb", "sage1_b", "sage1_t")]
    names += ["triton.sage2_8b", "triton.sage2pp_8_d1", "triton.sage1_b_f32"]
    names = names[:candidates]
    layers = []
    for number in range(sites):
        us = {name: chance.uniform(20, 120) for name in names}
        rows = tuple(
            sample(
                step + 1,
                {name: 1 - 10 ** chance.uniform(-5, -1) for name in names},
                (step, of),
                us=us,
                us_exact=100.0,
            )
            for step in (range(of) if every else sampled_steps(of))
        )
        layers.append(LayerTable(f"l{number}", "self", rows))
    return calibration(*layers)


def with_gaps(made: Calibration, seed: int) -> Calibration:
    """The table where each sample had no time for about a third of the kernels."""
    dice = random.Random(seed)

    def short(row: Sample) -> Sample:
        skipped = tuple(name for name in row.errors if dice.random() < 0.3)
        found = {name: one for name, one in row.errors.items() if name not in skipped}
        return replace(row, errors=found, skipped=skipped)

    layers = [replace(one, rows=tuple(map(short, one.rows)), runs={}) for one in made.layers]
    return replace(made, layers=tuple(layers))


def cost_of(entry, layer: LayerTable) -> list[float]:
    us = {SDPA.name: 100.0, **{name: row.us for name, row in layer.candidates.items()}}
    return [us[(entry.range_at(i / 200) or entry).variant] for i in range(201)]


# case 60
COUNTS = st.sampled_from([1, 2, 4, 8, 20, 50])


@given(st.integers(0, 10**6), COUNTS, st.floats(0.9, 1.0), st.floats(0.9, 1.0), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_higher_threshold_gains_no_speed_in_any_part(seed, of, one, two, gaps) -> None:
    made = random_table(random.Random(seed), 2, 4, of, False)
    made = with_gaps(made, seed) if gaps else made
    low, high = sorted((one, two))
    loose, strict = made.plan(low), made.plan(high)
    for layer, a, b in zip(made.layers, loose.entries, strict.entries, strict=True):
        assert all(x <= y for x, y in zip(cost_of(a, layer), cost_of(b, layer), strict=True))


@given(st.integers(0, 10**6), COUNTS, st.floats(0, 0.5), st.floats(0, 0.5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_larger_budget_makes_no_layer_slower(seed, of, one, two, gaps) -> None:
    made = random_table(random.Random(seed), 3, 4, of, False)
    made = with_gaps(made, seed) if gaps else made
    low, high = sorted((one, two))
    strict, loose = made.plan(budget=low), made.plan(budget=high)
    for layer, a, b in zip(made.layers, loose.entries, strict.entries, strict=True):
        assert all(x <= y for x, y in zip(cost_of(a, layer), cost_of(b, layer), strict=True))


@pytest.mark.parametrize("gaps", [False, True])
def test_sixty_layers_of_fifty_steps_and_eight_kernels_are_solved_in_under_a_second(gaps) -> None:
    made = random_table(random.Random(0), 60, 8, 50, True)
    made = with_gaps(made, 0) if gaps else made
    for bound in ({"threshold": 0.998}, {"budget": 0.05}, {"time_us": 3000.0}):
        start = time.process_time()
        plan = made.plan(**bound)
        assert time.process_time() - start < 1
        assert sum(len(entry.ranges) for entry in plan.entries) > 60


# Once wrong: a part of short calls was compared with exact attention on long ones.
def test_times_are_of_the_calls_that_they_are_compared_with() -> None:
    def row(step: int, us: float, us_exact: float):
        made = sample(step + 1, {FAST: 0.9995}, (step, 20), us={FAST: us}, us_exact=us_exact)
        return replace(made, shape=f"1x2x{us_exact:.0f}x64")

    # Long calls in the first half of the schedule, short ones in the second, where exact is faster.
    long = [row(step, 2000.0, 4000.0) for step in (0, 1, 2, 3, 6, 7, 8, 9)]
    short = [row(step, 130.0, 100.0) for step in (12, 13, 18, 19)]
    entry = entry_at(LayerTable("a", "self", (*long, *short)), 0.998)
    assert ran(entry, 20)[0] == FAST
    assert ran(entry, 20)[-1] == SDPA.name


# Once wrong: times of equal calls that differ by noise put plans out of their order.
def test_equal_calls_have_equal_times_in_every_part() -> None:
    other = "triton.sage2pp_8"
    rows = []
    for step in sampled_steps(20):
        noise = 1 + 0.04 * (-1) ** step
        times = {FAST: 50.0 * noise, other: 51.0 / noise}
        cosines = {FAST: 0.9995, other: 0.9999}
        rows.append(sample(step + 1, cosines, (step, 20), us=times, us_exact=200.0))
    layer = LayerTable("a", "self", tuple(rows))
    assert len(set(ran(entry_at(layer, 0.998), 20))) == 1
    assert set(ran(entry_at(layer, 0.9998), 20)) == {other}
