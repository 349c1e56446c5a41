"""What a layer's self-calibration times, and what it does where nothing can be timed."""

from __future__ import annotations

from dataclasses import replace

import torch
from models.layers import call, layer

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import candidates
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.timing import CallTime
from sagepatch.spec import Call


def half(one: Call) -> Call:
    return replace(one, q=one.q.bfloat16(), k=one.k.bfloat16(), v=one.v.bfloat16())


# Once wrong: the run ended with the allocator's error, or kernels were chosen without a comparison.
def test_a_layer_whose_exact_attention_cannot_be_timed_for_want_of_memory_stays_exact(
    monkeypatch,
) -> None:
    def clock(*_) -> CallTime:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(measuring.TIMERS, "cpu", clock)
    real = replace(BY_NAME["emulated.sage2_8"], toolchain="triton")
    monkeypatch.setattr(candidates, "CATALOGUE", (real,))
    one, table = layer(emulate=False), LayerCalibration(Stopwatch())
    for number in range(8):
        table.observe(one, half(call(seed=number)))
    assert [row.refused for row in table.rows] == [("triton.sage2_8",)] * 4
    assert entry_at(table.table(one), 0.998).variant == "sdpa.exact"
    assert len(one.record.notes) == 1
    assert one.record.notes[0].startswith("sdpa.exact did not fit in memory while measured")


def test_nothing_is_timed_where_emulations_may_win(monkeypatch) -> None:
    def clock(*_) -> CallTime:
        raise AssertionError("timed an emulation")

    monkeypatch.setitem(measuring.TIMERS, "cpu", clock)
    table = LayerCalibration(Stopwatch())
    for number in range(2):
        table.observe(layer(emulate=True), call(seed=number))
    assert all(row.us_exact is None for row in table.rows)
    assert all(errors.us is None for row in table.rows for errors in row.errors.values())
