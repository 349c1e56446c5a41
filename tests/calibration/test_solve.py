"""Plans under one bound for the whole model: monotone, within the bound, near the best there is."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.layers import calibration as layers_of
from models.layers import sample

from sagepatch.backends.catalogue import SDPA
from sagepatch.calibration.choose import LEAST_GAIN
from sagepatch.calibration.solve import (
    Option,
    combined,
    relative_error,
    steps,
    within_error,
    within_time,
)
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.errors import InvalidArgument

numbers = st.floats(0.0, 1.0, width=32)
layers = st.lists(
    st.lists(st.tuples(numbers, numbers), min_size=0, max_size=4).map(
        lambda pairs: [
            Option("exact", 0.0, 1.0),
            *(Option(f"k{i}", error, cost) for i, (error, cost) in enumerate(pairs)),
        ]
    ),
    min_size=1,
    max_size=4,
)


def cost(chosen):
    return sum(option.cost for option in chosen)


def error(chosen):
    return combined([option.error for option in chosen])


@given(layers, numbers)
def test_a_budget_is_kept(table, budget):
    assert error(within_error(table, budget)) <= budget * (1 + 1e-6) + 1e-9


@given(layers, numbers, numbers)
@settings(max_examples=200)
def test_moving_a_bound_moves_the_plan_one_way(table, one, other):
    less, more = sorted((one, other))
    strict, loose = within_error(table, less), within_error(table, more)
    assert all(a.error <= b.error and a.cost >= b.cost for a, b in zip(strict, loose, strict=True))
    slow, fast = within_time(table, more * 4), within_time(table, less * 4)
    assert all(a.error <= b.error and a.cost >= b.cost for a, b in zip(slow, fast, strict=True))


@given(layers, numbers)
@settings(max_examples=150)
def test_no_more_than_one_exchange_from_the_best(table, budget):
    best = min(
        cost(plan)
        for plan in itertools.product(*table)
        if sum(option.error**2 for option in plan) <= budget**2
    )
    most = max((step.saved for step in steps(table)), default=0.0)
    assert best - 1e-6 <= cost(within_error(table, budget)) <= best + most + 1e-6


@given(layers, numbers)
def test_a_time_is_reached_or_the_fastest_plan_returned(table, most):
    chosen = within_time(table, most * 4)
    fastest = sum(min(option.cost for option in options) for options in table)
    assert cost(chosen) <= most * 4 + 1e-6 or math.isclose(cost(chosen), fastest, abs_tol=1e-6)


def test_a_kernel_that_saves_nothing_is_never_taken():
    table = [[Option("exact", 0.0, 1.0), Option("slow", 0.01, 1.5), Option("fast", 0.02, 0.5)]]
    assert [o.variant for o in within_error(table, 1.0)] == ["fast"]
    assert [o.variant for o in within_error(table, 0.015)] == ["exact"]


def test_the_error_of_a_cosine():
    assert relative_error(1.0) == 0.0
    assert relative_error(1.0000001) == 0.0
    assert relative_error(0.9993) == pytest.approx(0.0374, abs=1e-4)


def test_a_thousand_layers_take_less_than_a_second():
    table = [
        [Option("exact", 0.0, 1.0), *(Option(f"k{i}", 0.01 * i, 1 / (i + n)) for i in range(1, 8))]
        for n in range(1, 1001)
    ]
    start = time.perf_counter()
    within_error(table, 0.3)
    within_time(table, 200.0)
    assert time.perf_counter() - start < 1


def calibration(timed: bool = True) -> Calibration:
    """Three layers: one quantises well, one badly, one has nothing to choose from."""

    def table(site, cosine):
        cosines = {
            "emulated.sage2_8": cosine,
            "emulated.sage1_b": 1 - (1 - cosine) / 8,
        }
        us = {"emulated.sage2_8": 50.0, "emulated.sage1_b": 80.0} if timed else None
        rows = (sample(n, cosines, us=us, us_exact=100.0 if timed else None) for n in (1, 2))
        return LayerTable(site, "self", tuple(rows))

    empty = LayerTable("c", "self", (sample(1, {}, us_exact=100.0 if timed else None),))
    return layers_of(table("a", 0.9998), table("b", 0.98), empty)


def variants(plan):
    return [entry.variant for entry in plan.entries]


def test_a_plan_by_budget_gives_the_error_to_the_layers_that_can_bear_it():
    made = calibration()
    assert variants(made.plan(budget=0.0)) == [SDPA.name] * 3
    assert variants(made.plan(budget=0.03)) == ["emulated.sage2_8", SDPA.name, SDPA.name]
    assert variants(made.plan(budget=0.08)) == ["emulated.sage2_8", "emulated.sage1_b", SDPA.name]
    assert variants(made.plan(budget=1.0)) == ["emulated.sage2_8", "emulated.sage2_8", SDPA.name]
    entry = made.plan(budget=0.03).entries[0]
    assert entry.reason.startswith("budget 0.03: the output is predicted to be off by 0.0200")
    assert list(entry.alternatives) == ["emulated.sage1_b"]
    assert made.plan(budget=0.03).threshold == 0.9998
    assert made.plan(budget=0.0).threshold == 1.0


def test_a_plan_by_time_stops_once_it_is_fast_enough():
    made = calibration()
    assert variants(made.plan(time_us=300)) == [SDPA.name] * 3
    assert variants(made.plan(time_us=250)) == ["emulated.sage2_8", SDPA.name, SDPA.name]
    assert variants(made.plan(time_us=1)) == ["emulated.sage2_8", "emulated.sage2_8", SDPA.name]


def test_a_layer_that_was_hardly_seen_says_so_under_every_bound():
    seen_once = sample(
        1, {"emulated.sage2_8": 0.9999}, us={"emulated.sage2_8": 50.0}, us_exact=100.0
    )
    unserved = tuple(sample(n, {}, us_exact=100.0) for n in (1, 2))
    made = layers_of(
        *calibration().layers[:2],
        LayerTable("once", "self", (seen_once,)),
        LayerTable("unserved", "self", unserved),
    )
    for bound in ({}, {"budget": 0.05}, {"time_us": 300}, {"budget": 0.05, "by_step": False}):
        found = {entry.site: entry.reason for entry in made.plan(**bound).entries}
        assert found["once"] == "only 1 of 2 samples seen: stays exact"
        assert found["unserved"] == "no quantised kernel serves this layer here"


def test_a_solver_takes_no_kernel_that_gains_too_little():
    def rows(us_fast):
        times = {"emulated.sage2_8": us_fast}
        one = {"emulated.sage2_8": 0.99999}
        return tuple(sample(n, one, us=times, us_exact=100.0) for n in (1, 2))

    for bound in ({"budget": 1.0}, {"time_us": 1}, {"threshold": 0.9}):
        pays = 100.0 - 100.0 * LEAST_GAIN
        for us, wanted in ((pays, "emulated.sage2_8"), (pays + 1, SDPA.name)):
            made = layers_of(LayerTable("a", "self", rows(us)))
            assert variants(made.plan(**bound)) == [wanted]


def test_a_budget_without_times_ranks_the_tiers():
    assert variants(calibration(timed=False).plan(budget=0.08))[0] == "emulated.sage2_8"


def test_a_threshold_is_what_it_was():
    made = calibration()
    assert made.plan() == made.plan(0.998) == made.plan(threshold=0.998)


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"threshold": 0.9, "budget": 0.1}, "threshold and budget exclude each other"),
        ({"budget": 0.1, "time_us": 5}, "budget and time_us exclude each other"),
        ({"budget": -0.1}, "budget is -0.1"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"time_us": -1}, "time_us is -1"),
        # Once wrong: True is 1 to Python, and everything would be exact.
        ({"threshold": True}, "threshold is True, needs a number"),
        ({"budget": False}, "budget is False, needs a number"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds, told):
    with pytest.raises(InvalidArgument, match=told):
        calibration().plan(**bounds)


def test_a_time_needs_times():
    with pytest.raises(InvalidArgument, match="layers such as a have none"):
        calibration(timed=False).plan(time_us=10)
