"""Times of calls on a GPU whose clock, and whose host's, the tests turn."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from models.virtual_gpu import CYCLE_US, VirtualGpu

from sagepatch.calibration import timing
from sagepatch.calibration.timing import call_time, queued

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch) -> VirtualGpu:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return VirtualGpu(monkeypatch)


# Once wrong: a call of 5 us on an idle GPU took as long as its host.
@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("device_us", [2.0, 5.0, 40.0, 150.0, 900.0, 30_000.0])
@pytest.mark.parametrize("host_us", [4.0, 60.0, 300.0])
def test_the_gpu_and_the_host_are_told_apart(gpu, thorough, device_us, host_us) -> None:
    found = call_time(lambda: gpu.queue(host_us, device_us), GPU, thorough)
    assert found.device_us == pytest.approx(device_us)
    assert found.host_us == pytest.approx(host_us)
    assert found.us == max(found)


def test_what_many_calls_take_is_the_slower_of_the_two(gpu) -> None:
    assert call_time(lambda: gpu.queue(60.0, 5.0), GPU).us == pytest.approx(60.0)
    assert call_time(lambda: gpu.queue(60.0, 500.0), GPU).us == pytest.approx(500.0)
    # The clock can see that: 100 calls take so long.
    gpu.synchronize()
    began = gpu.host
    for _ in range(100):
        gpu.queue(60.0, 5.0)
    gpu.synchronize()
    assert gpu.host - began == pytest.approx(100 * 60.0, rel=0.01)


def test_a_host_that_was_held_up_once_costs_another_try(gpu) -> None:
    calls = []

    def run() -> None:
        calls.append(0)
        gpu.queue(50_000.0 if len(calls) == 3 else 10.0, 20.0)

    (taken,), host = queued(run, GPU, 1, 5)
    assert (taken, host) == (pytest.approx(20.0), pytest.approx(10.0))
    assert len(calls) == 10


def test_a_host_that_is_always_held_up_gives_no_less_than_the_work(gpu) -> None:
    calls = []

    def run() -> None:
        calls.append(0)
        gpu.queue(50_000.0, 20.0)

    (taken,), _ = queued(run, GPU, 1)
    assert taken >= 20.0
    assert len(calls) == timing.TRIES + 1


def test_a_call_that_waits_for_the_gpu_takes_all_that_it_takes(gpu) -> None:
    def run() -> None:
        gpu.queue(30.0, 100.0)
        gpu.synchronize()

    found = call_time(run, GPU)
    assert found.us == pytest.approx(130.0)


# Clocks up to three times as high, or far lower.
@pytest.mark.parametrize("factor", [1 / 3, 0.8, 5.0])
def test_a_gpu_of_another_clock_waits_as_well(gpu, factor) -> None:
    gpu.cycle_us = CYCLE_US * factor
    found = call_time(lambda: gpu.queue(60.0, 7.0), GPU)
    assert found == (pytest.approx(7.0), pytest.approx(60.0))


# Once wrong: one slow call of the host decided what a kernel costs.
def test_a_host_that_is_slow_once_in_four_is_not_slow(gpu) -> None:
    calls = []

    def run() -> None:
        calls.append(0)
        gpu.queue(400.0 if len(calls) % 4 == 0 else 20.0, 34.0)

    for thorough in (False, True):
        assert call_time(run, GPU, thorough) == (pytest.approx(34.0), pytest.approx(20.0))


def test_what_is_between_runs_is_not_counted(gpu) -> None:
    taken, host = queued(lambda: gpu.queue(60.0, 7.0), GPU, 4, between=lambda: gpu.queue(5.0, 40.0))
    assert taken == [pytest.approx(7.0)] * 4
    assert host == pytest.approx(60.0)


def test_a_first_look_is_short_and_long_calls_are_few(gpu) -> None:
    calls = []

    def run(us: float) -> None:
        calls.append(us)
        gpu.queue(60.0, us)

    call_time(lambda: run(5.0), GPU, thorough=False)
    assert len(calls) <= 6
    calls.clear()
    call_time(lambda: run(60_000.0), GPU)
    assert len(calls) <= 1 + timing.FEWEST_RUNS
