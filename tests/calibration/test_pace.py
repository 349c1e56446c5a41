"""Which calls are measured, by a clock that tests turn."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch

from sagepatch.calibration.pace import Pace, power_of_two, spread
from sagepatch.calibration.sections import sampled_steps
from sagepatch.schedule import Place

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(steps: int, *, own: float, cost: float, once: float = 0.0, layers: int = 3, calls: int = 1):
    """The steps that a run of `steps` measures, where a step takes `own` seconds and measuring it
    `cost`; the first measured one `once` more for compiling. And its pace.
    """
    clock = Clock()
    pace = Pace(clock)
    measured: list[int] = []
    with pace.running("a"):
        for step in range(steps):
            place = Place(step, steps)
            for _ in range(layers):
                clock.now += own / layers
                for count in range(1, calls + 1):
                    if pace.due(place, count):
                        with pace.measuring(place, CPU) as timing:
                            if not measured:
                                with timing.preparing():
                                    clock.now += once
                            clock.now += cost / layers / calls
                        measured.append(step)
    return sorted(set(measured)), pace


def test_powers_of_two() -> None:
    assert [n for n in range(-1, 20) if power_of_two(n)] == [1, 2, 4, 8, 16]


def test_steps_are_spread() -> None:
    wanted = [0, 1, 3, 4, 6, 7]
    assert spread(wanted, 0) == frozenset()
    assert spread(wanted, -3) == frozenset()
    assert spread(wanted, 1) == {3}
    assert spread(wanted, 2) == {3, 1}
    assert spread(wanted, 9) == {1, 3, 4, 6}
    assert spread([0], 2) == frozenset()
    assert spread(wanted, 2, {3: 1, 1: 1}) == {4, 6}


def test_later_runs_measure_what_earlier_ones_could_not_afford() -> None:
    clock = Clock()
    pace = Pace(clock, held=[0.5])
    measured: list[set[int]] = []
    for _ in range(4):
        measured.append(set())
        with pace.running("a"):
            for step in range(28):
                clock.now += 1.0
                if pace.due(Place(step, 28), 1):
                    measured[-1].add(step)
                    with pace.measuring(Place(step, 28), CPU):
                        clock.now += 7.5
    assert all(len(one) == 3 and {0, 27} <= one for one in measured)
    between = [min(one - {0, 27}) for one in measured]
    assert len(set(between)) == 4
    # Half of the schedule was measured before.
    assert 17 not in between


# case 58
@pytest.mark.parametrize("steps", [4, 8, 28, 50])
@pytest.mark.parametrize("cost", [0.01, 0.3, 1.0, 3.0, 10.0])
def test_measuring_takes_at_most_as_long_as_the_run(steps: int, cost: float) -> None:
    measured, pace = run(steps, own=1.0, cost=cost)
    assert measured[0] == 0
    assert measured[-1] == steps - 1
    assert set(measured) <= set(sampled_steps(steps))
    # Two steps are measured whatever they cost.
    allowed = max(pace.run_seconds, 2 * cost)
    assert pace.measuring_seconds <= allowed * 1.001
    assert pace.run_seconds == pytest.approx(steps)
    if cost <= 0.3 and steps > 4:
        assert tuple(measured) == sampled_steps(steps)


# Once wrong: all of the run's time was planned to be spent, by the cost of the cheapest step.
@pytest.mark.parametrize("cost", [0.3, 1.0, 1.9, 2.6, 3.3])
def test_steps_that_cost_more_than_the_first_stay_within_the_run(cost: float) -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.running("a"):
        for step in range(8):
            clock.now += 1.0
            if pace.due(Place(step, 8), 1):
                with pace.measuring(Place(step, 8), CPU):
                    clock.now += cost if step == 0 else 1.15 * cost
    assert pace.measuring_seconds <= pace.run_seconds


def spoilt_run(steps: int, spoilt: set[int], *, cost: float, layers: int = 3) -> tuple[list, Pace]:
    """The steps that a run measures where no call of some steps is a sample, a step takes a second
    and measuring it `cost`; and its pace.
    """
    clock = Clock()
    pace = Pace(clock, layers=layers)
    measured: list[int] = []
    with pace.running("a"):
        for step in range(steps):
            for _ in range(layers):
                clock.now += 1.0 / layers
                if pace.due(Place(step, steps), 1):
                    measured.append(step)
                    with pace.measuring(Place(step, steps), CPU) as timing:
                        clock.now += cost / layers
                        timing.spoilt = step in spoilt
    return sorted(set(measured)), pace


# Once wrong: a call whose output was not finite counted as a sample of its step.
def test_the_next_step_takes_the_place_of_a_first_one_without_samples() -> None:
    assert spoilt_run(28, set(), cost=7.5)[0] == [0, 10, 27]
    assert spoilt_run(28, {0}, cost=7.5)[0] == [0, 2, 27]
    # The places of what follows are spread from the first step that gave samples.
    assert spoilt_run(28, {0}, cost=4.5)[0] == [0, 2, 10, 17, 27]


@pytest.mark.parametrize("cost", [0.3, 1.0, 3.0])
def test_a_model_without_finite_outputs_is_not_looked_at_for_longer_than_it_runs(cost) -> None:
    for spoilt in ({0}, set(range(8)), {3, 7}):
        measured, pace = spoilt_run(8, spoilt, cost=cost)
        assert {0, 7} <= set(measured)
        assert pace.measuring_seconds <= max(pace.run_seconds, 2 * cost) * 1.001


def test_a_section_that_gave_no_sample_is_measured_by_the_next_run() -> None:
    clock = Clock()
    pace = Pace(clock)
    measured: list[list[int]] = []
    for _ in range(2):
        measured.append([])
        with pace.running("a"):
            for step in range(28):
                clock.now += 1.0
                if pace.due(Place(step, 28), 1):
                    measured[-1].append(step)
                    with pace.measuring(Place(step, 28), CPU) as timing:
                        clock.now += 7.5
                        timing.spoilt = step == 10
    assert measured == [[0, 10, 27], [0, 10, 27]]


@pytest.mark.parametrize("raises", [False, True], ids=["not finite", "raised"])
def test_a_call_that_was_no_sample_takes_no_share_of_the_account(raises: bool) -> None:
    clock = Clock()
    pace = Pace(clock, layers=4)
    place = Place(0, 2)
    rooms = []
    with pace.running("a"):
        for number in range(3):
            clock.now += 1.0
            assert pace.due(place, 1)
            with suppress(RuntimeError), pace.measuring(place, CPU) as timing:
                rooms.append(pace.room(place, timing))
                if number == 1:
                    timing.spoilt = True
                    if raises:
                        raise RuntimeError
    # From layer to layer a second: 8 in all, for 8 samples that are to come, then for 7; the second
    # call was none of them.
    assert rooms == [math.inf, pytest.approx(0.85 * 8 / 7), pytest.approx(0.85 * 8 / 7)]


def test_a_costly_calibration_spreads_what_it_can_afford() -> None:
    assert run(28, own=1.0, cost=5.5)[0] == [0, 10, 17, 27]
    assert run(28, own=1.0, cost=7.5)[0] == [0, 10, 27]


def test_what_is_done_once_takes_no_step_s_place() -> None:
    plain, _ = run(28, own=1.0, cost=2.0)
    compiled, pace = run(28, own=1.0, cost=2.0, once=1000.0)
    assert compiled == plain
    assert pace.measuring_seconds == pytest.approx(2.0 * len(plain))
    assert pace.preparing_seconds == pytest.approx(1000.0)
    assert pace.run_seconds == pytest.approx(28)


def test_each_run_starts_anew_and_adds_up() -> None:
    clock = Clock()
    pace = Pace(clock)
    for name in ("a", "b"):
        with pace.running(name):
            assert pace.run == name
            for step in range(4):
                clock.now += 1.0
                if pace.due(Place(step, 4), 1):
                    with pace.measuring(Place(step, 4), CPU):
                        clock.now += 0.5
        assert pace.run == ""
    assert pace.run_seconds == pytest.approx(8)
    assert pace.measuring_seconds == pytest.approx(4)


# Once wrong: the last step of the second walk was that of the first.
@pytest.mark.parametrize("lengths", [(28, 4), (4, 28), (8, 8), (8, 8, 8)])
def test_each_walk_of_a_run_has_its_first_and_its_last_step(lengths: tuple[int, ...]) -> None:
    clock = Clock()
    pace = Pace(clock)
    measured: list[list[int]] = []
    with pace.running("a"):
        for steps in lengths:
            measured.append([])
            for step in range(steps):
                clock.now += 1.0
                if pace.due(Place(step, steps), 1):
                    with pace.measuring(Place(step, steps), CPU):
                        clock.now += 0.8
                    measured[-1].append(step)
    for steps, found in zip(lengths, measured, strict=True):
        assert (found[0], found[-1]) == (0, steps - 1)
        # What measuring the others took is not on this walk's account.
        assert tuple(found) == sampled_steps(steps)
    assert pace.run_seconds == pytest.approx(sum(lengths))


def test_a_walk_inside_another_has_an_account_of_its_own() -> None:
    pace = Pace(Clock())
    measured = set()
    with pace.running("a"):
        for step in range(8):
            if pace.due(Place(step, 8), 1):
                measured.add((step, 8))
            for inner in range(4 if step == 3 else 0):
                if pace.due(Place(inner, 4), 1):
                    measured.add((inner, 4))
    assert {(0, 8), (7, 8), (0, 4), (3, 4)} <= measured


def test_a_gpu_that_lags_behind_the_host_is_waited_for(monkeypatch) -> None:
    gpu, clock = torch.device("cuda", 0), Clock()
    pace = Pace(clock)
    queued = 0.0

    def wait(device) -> None:
        nonlocal queued
        clock.now += queued
        queued = 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    measured = []
    with pace.running("a"):
        for step in range(28):
            # A second of the GPU's time, of which the host needs a hundredth.
            clock.now += 0.01
            queued += 0.99
            if pace.due(Place(step, 28), 1, gpu):
                measured.append(step)
                with pace.measuring(Place(step, 28), gpu):
                    clock.now += 2.0
    assert tuple(measured) == sampled_steps(28)
    assert pace.run_seconds == pytest.approx(28.0)


def test_without_a_schedule_calls_are_measured_ever_more_rarely() -> None:
    pace = Pace()
    with pace.running("a"):
        assert [n for n in range(1, 40) if pace.due(None, n)] == [1, 2, 4, 8, 16, 32]


def test_an_interrupted_run_is_counted() -> None:
    clock = Clock()
    pace = Pace(clock)

    def interrupted() -> None:
        with pace.running("a"):
            clock.now += 3.0
            with pace.measuring(None, CPU):
                clock.now += 1.0
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (pace.run_seconds, pace.measuring_seconds) == (pytest.approx(3), pytest.approx(1))


def test_remedies_are_looked_for_where_there_is_time() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.running("a"):
        for step in range(8):
            place = Place(step, 8)
            for _ in range(20):
                clock.now += 0.05
                if pace.due(place, 1):
                    with pace.measuring(place, CPU):
                        clock.now += 0.01
                        if pace.spares(place):
                            with pace.diagnosing(place):
                                clock.now += 0.2
    # Half a second, and one search that was begun.
    assert pace.measuring_seconds <= pace.run_seconds + 0.7
    assert pace.run_seconds == pytest.approx(8.0)
    # All steps were measured: remedies took nothing from them.
    measured = {step for step, due in pace._walks[8].decided.items() if due}
    assert measured == set(sampled_steps(8))


# Once wrong: a short run on a GPU spent half a second on remedies before it knew how short it was.
@pytest.mark.parametrize(("layer_s", "found"), [(0.002, False), (1.0, True)])
def test_samples_that_share_an_account_spend_on_remedies_what_it_has(layer_s, found) -> None:
    clock, looked = Clock(), []
    pace = Pace(clock, layers=6)
    with pace.running("a"):
        for step in range(4):
            place = Place(step, 4)
            for _ in range(6):
                clock.now += layer_s
                if pace.due(place, 1):
                    with pace.measuring(place, CPU):
                        clock.now += 0.001
                        if pace.spares(place):
                            looked.append(step)
                            with pace.diagnosing(place):
                                clock.now += 0.2
    assert bool(looked) is found
    assert pace.measuring_seconds <= pace.run_seconds


def test_a_model_that_calibrates_itself_is_diagnosed_too() -> None:
    pace = Pace(Clock(), layers=6)
    assert pace.spares(Place(0, 4))
    assert pace.spares(None)
