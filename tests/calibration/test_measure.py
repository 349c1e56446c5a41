"""Measurements of one call, and times that layers share."""

from __future__ import annotations

import math

import pytest
import torch
from models.layers import call

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.measure import Stopwatch, all_finite, measure
from sagepatch.calibration.timing import CallTime, call_time
from sagepatch.errors import KernelUnavailable
from sagepatch.numerics.metrics import compare
from sagepatch.ops import run_exact, run_variant

FAST = BY_NAME["emulated.sage2_8"]


@pytest.fixture
def timer(monkeypatch):
    """Counts what a clock for the CPU was asked to time; each reading is a unit higher."""
    asked: list[tuple[torch.device, bool]] = []

    def read(run, device, thorough) -> CallTime:
        run()
        asked.append((device, thorough))
        return CallTime(100.0 + len(asked), 7.0)

    monkeypatch.setitem(measuring.TIMERS, "cpu", read)
    return asked


@pytest.mark.parametrize("heads_at_once", [1, 3, 100])
def test_every_head_is_compared_in_groups_of_any_size(monkeypatch, heads_at_once: int) -> None:
    one = call(B=2, H=7)
    exact, _ = run_exact(one)
    out, _ = run_variant(FAST, one)
    monkeypatch.setattr(measuring, "COMPARED_NUMBERS", heads_at_once * out[:, 0].numel())
    row, want = measure(FAST, one, exact), compare(out, exact)
    assert row.worst_head == want.worst_head
    assert row.cosine == pytest.approx([head.cosine for head in want.heads], abs=1e-12)
    assert row.rel_l1 == pytest.approx([head.rel_l1 for head in want.heads])
    assert row.rmse == pytest.approx([head.rmse for head in want.heads])
    assert row.norm_ratio == pytest.approx([head.norm_ratio for head in want.heads])
    assert row.us is None


# case 58
def test_long_calls_are_compared_on_a_sample_of_rows(monkeypatch) -> None:
    seen = []

    def spy(out, reference):
        seen.append(tuple(out.shape))
        return compare(out, reference)

    monkeypatch.setattr(measuring, "compare", spy)
    monkeypatch.setattr(measuring, "COMPARED_ROWS", 16)
    one = call(Sq=33)
    exact, _ = run_exact(one)
    measure(FAST, one, exact)
    assert seen == [(1, 2, 11, 32)]


def test_one_bad_head_is_enough(monkeypatch) -> None:
    one = call(H=5)
    exact, _ = run_exact(one)
    exact[:, 3] = -exact[:, 3]
    row = measure(FAST, one, exact)
    assert (row.worst_head, row.finite) == (3, True)
    assert row.cosine[3] < -0.99
    assert min(row.cosine[:3]) > 0.99


def test_times_are_taken_twice_and_shared(timer) -> None:
    watch = Stopwatch()
    for seed in range(5):
        one = call(seed=seed)
        # The lower of the two counts.
        assert watch.us(FAST, one, one.spec()) == 101.0
    assert len(timer) == measuring.ROUNDS
    other = call(Sq=40)
    watch.us(FAST, other, other.spec())
    watch.us(SDPA, other, other.spec())
    assert len(timer) == measuring.ROUNDS + 2
    # A first look, then with care.
    assert timer == [(torch.device("cpu"), care) for care in (False, True, False, True)]


# Once wrong: what the guard had done over was timed again at every sample of the layer.
def test_a_kernel_that_was_done_over_is_timed_once_for_its_layer_and_anew_for_another(
    timer,
) -> None:
    watch, bad, good = Stopwatch(), call(), call(seed=1)
    bad.q[0, 0, 3] = math.nan
    assert [watch.us(FAST, bad, bad.spec(), layer="a") for _ in range(5)] == [101.0] * 5
    assert len(timer) == 1
    # Its output was computed twice: that is no other layer's time, nor the kernel's on the host.
    assert watch.host_us(FAST, bad.spec()) is None
    assert watch.us(FAST, good, good.spec(), layer="b") == 102.0
    assert watch.us(FAST, bad, bad.spec(), layer="a") == 102.0
    assert len(timer) == 2


@pytest.mark.parametrize("kind", [KernelUnavailable, torch.OutOfMemoryError])
def test_a_kernel_that_could_not_serve_is_not_tried_again_by_its_layer(
    timer, monkeypatch, kind
) -> None:
    tries = []

    def failing(variant, given):
        tries.append(variant.name)
        raise kind("no room")

    monkeypatch.setattr(measuring, "run_variant", failing)
    watch, one = Stopwatch(), call()
    for layer in ("a", "a", "a", "b", "b"):
        with pytest.raises(kind, match="no room"):
            watch.us(FAST, one, one.spec(), layer=layer)
    assert (len(tries), len(timer)) == (2, 0)
    monkeypatch.undo()
    monkeypatch.setitem(measuring.TIMERS, "cpu", lambda *_: CallTime(9.0, 7.0))
    # Another call had room.
    assert watch.us(FAST, one, one.spec(), layer="c") == 9.0
    assert watch.us(FAST, one, one.spec(), layer="a") == 9.0


# Once wrong: exact attention looked slow at first sight, and nobody looked again.
def test_exact_attention_is_timed_twice_and_with_care(monkeypatch) -> None:
    times = {SDPA.name: iter([409.0, 34.0]), FAST.name: iter([57.0, 55.0])}
    asked = []
    name = SDPA.name

    def read(run, device, thorough) -> CallTime:
        asked.append((name, thorough))
        return CallTime(next(times[name]), 0.0)

    monkeypatch.setitem(measuring.TIMERS, "cpu", read)
    watch, one = Stopwatch(), call()
    for _ in range(3):
        found = {}
        for variant in (SDPA, FAST):
            name = variant.name
            found[name] = watch.us(variant, one, one.spec())
    assert found == {SDPA.name: 34.0, FAST.name: 57.0}
    assert asked[:2] == [(SDPA.name, True), (FAST.name, False)]
    assert asked[2] == (SDPA.name, True)


def test_a_cpu_has_no_times_that_mean_anything() -> None:
    one = call()
    assert Stopwatch().us(SDPA, one, one.spec()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_timed_on_the_device_of_the_call() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    x = torch.randn(2048, 2048, device=last)
    us = call_time(lambda: x @ x, last).us
    assert 1 < us < 1e6
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    out = torch.full((2, 3, 40, 8), largest, dtype=dtype)
    out[0, 0] = -largest
    assert all_finite(out).item()
    for value in (math.nan, math.inf, -math.inf):
        for at in ((0, 0, 0, 0), (1, 2, 39, 7), (1, 0, 21, 3)):
            bad = out.clone()
            bad[at] = value
            assert not all_finite(bad).item()
            assert not all_finite(bad.transpose(1, 2)).item()
