"""The account of a run where calls have no schedule, and where threads measure at once."""

from __future__ import annotations

import pytest

from sagepatch.calibration.pace import CPU, Pace
from sagepatch.schedule import Place


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def unplaced(calls: int, each: float, layers: int = 12, timing: float = 0.0) -> tuple[Pace, list]:
    """A run of passes without a schedule, a second a layer, whose samples take `each` seconds."""
    clock = Clock()
    pace = Pace(clock, layers=layers)
    measured = []
    with pace.running("a"):
        for call in range(1, calls + 1):
            for layer in range(layers):
                if pace.due(None, call):
                    measured.append((call, layer))
                    with pace.measuring(None, CPU) as one:
                        clock.now += each
                        if len(measured) == 1:
                            with one.running():
                                clock.now += timing
                clock.now += 1.0
    return pace, measured


@pytest.mark.parametrize("each", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("calls", [8, 28, 50])
def test_without_a_schedule_the_run_pays_for_what_is_measured(calls: int, each: float) -> None:
    pace, measured = unplaced(calls, each, timing=5.0)
    assert pace.measuring_seconds <= pace.run_seconds == pytest.approx(12 * calls)
    taken = sorted({call for call, _ in measured})
    # Every layer has the same calls, and two of them at least.
    assert len(measured) == 12 * len(taken)
    assert taken[:2] == [1, 2]
    if each == 0.01:
        assert taken == [n for n in (1, 2, 4, 8, 16, 32) if n <= calls]


def test_without_a_schedule_two_calls_are_measured_whatever_they_cost() -> None:
    _, measured = unplaced(8, 50.0)
    assert sorted({call for call, _ in measured}) == [1, 2]


def test_threads_that_measure_at_once_leave_the_run_its_own_time() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.running("a"):
        clock.now += 2.0
        # As two threads would: one begins while the other measures.
        with pace.measuring(None, CPU):
            clock.now += 1.0
            with pace.measuring(Place(0, 4), CPU):
                clock.now += 3.0
            clock.now += 1.0
        clock.now += 0.5
    assert pace.run_seconds == pytest.approx(2.5)


def test_what_a_thread_of_an_earlier_run_still_measures_is_none_of_this_run() -> None:
    clock = Clock()
    pace = Pace(clock)
    with pace.running("a"):
        left = pace.measuring(None, CPU)
        left.__enter__()
        clock.now += 7.0
    with pace.running("b"):
        clock.now += 1.0
        left.__exit__(None, None, None)
        clock.now += 2.0
    assert pace.run_seconds == pytest.approx(2.0)
