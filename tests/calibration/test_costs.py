"""Which parts of a sample are worth their time; a short generation pays for few of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from models.layers import call, layer, sample

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import candidates, capture
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.choose import LEAST_GAIN
from sagepatch.calibration.costs import Costs, by_use
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.pace import Pace
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.sample import Sample
from sagepatch.calibration.table import LayerTable
from sagepatch.calibration.timing import CallTime
from sagepatch.schedule import Place

RECIPES = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_b_f32")
KERNELS = [replace(BY_NAME[f"emulated.{name}"], toolchain="triton") for name in RECIPES]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_what_no_plan_takes_is_measured_last() -> None:
    exact = 1000.0
    # As much faster than exact attention as a plan asks for, and how much more or less.
    paying = exact - LEAST_GAIN * exact
    us = {
        "triton.sage2pp_8": paying - 2,
        "triton.sage2_8": paying - 3,
        "triton.sage1_b": exact + 1,
        "triton.sage1_b_f32": paying - 1,
    }

    def order(us_exact: float | None) -> list[str]:
        return [variant.recipe.name for variant in by_use(KERNELS, us, us_exact)]

    # The fastest of each tier that pays, then the others that do, then those that do not.
    assert order(exact) == ["sage2_8", "sage1_b_f32", "sage2pp_8", "sage1_b"]
    # The safe one does not pay any more.
    assert order(exact - 1.5) == ["sage2_8", "sage2pp_8", "sage1_b_f32", "sage1_b"]
    assert order(1.0) == ["sage2_8", "sage2pp_8", "sage1_b_f32", "sage1_b"]
    assert order(None) == list(RECIPES)


def test_room_buys_statistics_before_a_second_candidate() -> None:
    clock, spec = Clock(), call().spec()
    costs = Costs(clock)
    assert costs.affordable(0.001, 4, spec) == 4
    with costs.counting("candidates", spec, of=[1, 2]):
        clock.now += 2.0
    with costs.counting("statistics", spec):
        clock.now += 0.5
    rooms = (-3.0, 1.0, 1.5, 2.4, 2.5, 9.0, math.inf)
    found = {
        room: (costs.affordable(room, 4, spec), costs.admits_statistics(room, spec))
        for room in rooms
    }
    assert found == {
        -3.0: (1, False),
        1.0: (1, False),
        1.5: (1, True),
        2.4: (1, True),
        2.5: (2, True),
        9.0: (4, True),
        math.inf: (4, True),
    }


# Once wrong: what comparing costs once counted as the cost of each, so that few were measured and
# each looked dear, for ever.
def test_what_a_sample_costs_once_is_told_from_what_each_candidate_costs() -> None:
    clock, spec = Clock(), call().spec()
    costs = Costs(clock)

    def sampled(many: int, once: float = 2.0) -> None:
        with costs.counting("candidates", spec, of=[0] * many):
            clock.now += once + 0.5 * many

    sampled(6, once=20.0)  # the first: what it needed was loaded, too
    sampled(1)
    assert costs.affordable(5.0, 6, spec) == 1
    assert costs.affordable(7.0, 6, spec) == 2
    sampled(2)
    assert costs.affordable(5.0, 6, spec) == 6
    assert costs.affordable(4.4, 6, spec) == 4


# Once wrong: a large layer's cost cut what a small one measured.
def test_calls_of_another_size_have_costs_of_their_own() -> None:
    clock = Clock()
    costs, large, small = Costs(clock), call(Sq=64).spec(), call(Sq=8).spec()
    with costs.counting("candidates", large, of=[1]):
        clock.now += 1.0
    assert costs.affordable(0.3, 6, small) == 6
    with costs.counting("candidates", small, of=[1]):
        clock.now += 0.01
    assert costs.affordable(0.3, 6, large) == 1
    assert costs.affordable(0.3, 6, small) == 6


def calibrated(monkeypatch, steps: int, layers: int, own: float):
    """A run of so many steps on a machine where each layer's own work takes `own` seconds, a
    candidate one, statistics half a one, and timing a kernel a tenth: tables and the pace.
    """
    clock = Clock()
    times = {"sdpa.exact": 100.0} | {kernel.name: 60.0 + i for i, kernel in enumerate(KERNELS)}

    def spend(seconds: float, function):
        def spending(*arguments):
            clock.now += seconds
            return function(*arguments)

        return spending

    def us(self, variant, one, spec, again=True, layer=""):
        clock.now += 0.1
        return times[variant.name]

    monkeypatch.setattr(candidates, "CATALOGUE", tuple(KERNELS))
    monkeypatch.setitem(measuring.TIMERS, "cpu", lambda *_: CallTime(1.0, 0.0))
    monkeypatch.setattr(Stopwatch, "us", us)
    monkeypatch.setattr(capture, "measured_rows", spend(1.0, measuring.measured_rows))
    monkeypatch.setattr(capture, "statistics", spend(0.5, capture.statistics))
    monkeypatch.setattr(capture, "diagnosed", lambda call, exact, made, known: known)
    pace, costs, watch = Pace(clock, layers=layers), Costs(clock), Stopwatch()
    tables = [LayerCalibration(watch, None, pace, costs=costs) for _ in range(layers)]
    names = [layer(str(number), emulate=False) for number in range(layers)]
    small = call()
    small = replace(small, q=small.q.half(), k=small.k.half(), v=small.v.half())
    with pace.running("a"):
        for step in range(steps):
            for one in names:
                clock.now += own
                one.schedule.place = lambda s=step: Place(s, steps)
                tables[int(one.name)].observe(one, small)
    return [
        LayerTable(one.name, "self", tuple(t.rows)) for one, t in zip(names, tables, strict=True)
    ], pace


# "at most one extra generation's time"
@pytest.mark.parametrize("own", [1.0, 1.5, 3.0])
def test_a_run_of_four_steps_pays_for_what_it_measures(monkeypatch, own: float) -> None:
    tables, pace = calibrated(monkeypatch, 4, 12, own)
    assert pace.run_seconds == pytest.approx(4 * 12 * own)
    assert pace.measuring_seconds <= pace.run_seconds
    # Every layer can be settled, on the first choice at least.
    assert all({0, 3} <= {row.step for row in table.rows} for table in tables)
    assert all("triton.sage2pp_8" in table.names for table in tables)


def test_a_long_run_measures_everything(monkeypatch) -> None:
    tables, pace = calibrated(monkeypatch, 28, 6, 3.0)
    assert pace.measuring_seconds <= pace.run_seconds
    assert all(len(table.names) == len(KERNELS) and not table.unmeasured for table in tables)
    assert all(row.statistics is not None for table in tables for row in table.rows)


def test_a_plan_names_what_there_was_no_time_for(monkeypatch) -> None:
    tables, _ = calibrated(monkeypatch, 4, 12, 1.0)
    short = next(table for table in tables if table.unmeasured)
    assert set(short.unmeasured) | set(short.names) == {kernel.name for kernel in KERNELS}
    reason = entry_at(short, 0.9).reason
    assert reason.endswith(
        f"; not measured, as a generation's time was spent: {', '.join(short.unmeasured)}"
    )
    # What one sample had no time for is not measured in vain by the next.
    for before, after in zip(short.rows, short.rows[1:], strict=False):
        assert set(before.skipped) <= set(after.skipped)
        assert not set(before.skipped) & set(after.errors)


def test_tables_keep_what_was_skipped() -> None:
    from sagepatch.calibration.table import Calibration
    from sagepatch.calibration.table_json import parsed, rendered

    row = Sample(1, 0, 4, "x", "bf16", skipped=("triton.sage1_b",))
    table = Calibration(
        "f", "m", False, "g", {}, (LayerTable("a", "self", (row,)),), preparing_seconds=2.5
    )
    text = rendered(table)
    back = parsed(text, "t")
    assert back["layers"][0][2][0].skipped == ("triton.sage1_b",)
    assert back["preparing_seconds"] == 2.5
    # A table of before has neither.
    old = json.loads(text)
    del old["preparing_seconds"], old["layers"][0]["rows"][0]["skipped"]
    back = parsed(json.dumps(old), "t")
    assert (back["layers"][0][2][0].skipped, back["preparing_seconds"]) == ((), 0.0)


# case 58
def test_a_short_schedule_emulates_one_candidate_a_tier() -> None:
    for steps, wanted in ((4, {"sage2pp_8", "sage1_b"}), (8, set(RECIPES))):
        pace = Pace(Clock())
        one, table = layer(), LayerCalibration(Stopwatch(), None, pace)
        with pace.running("a"):
            for step in range(steps):
                one.schedule.place = lambda s=step, of=steps: Place(s, of)
                table.observe(one, call(seed=step))
        made = LayerTable("a", "self", tuple(table.rows))
        assert set(made.names) == {f"emulated.{name}" for name in wanted}
        assert set(made.unmeasured) == {f"emulated.{name}" for name in set(RECIPES) - wanted}


# Once wrong: two sittings that had no time for different candidates left none.
def test_layers_whose_samples_share_no_candidate_say_so() -> None:
    first, second = KERNELS[0].name, KERNELS[1].name
    rows = (
        sample(1, {first: 0.9999}, us={first: 50.0}, us_exact=100.0),
        sample(2, {second: 0.9999}, us={second: 50.0}, us_exact=100.0),
    )
    rows = tuple(
        replace(row, skipped=(name,)) for row, name in zip(rows, (second, first), strict=True)
    )
    entry = entry_at(LayerTable("a", "self", rows), 0.998)
    assert entry.reason.startswith("no kernel was measured in 2 samples; not measured")
