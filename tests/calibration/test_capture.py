"""One layer's self-calibration: which calls it measures, what it keeps, what it refuses."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models.layers import call, layer, sample

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import candidates, capture
from sagepatch.calibration import measure as measuring
from sagepatch.calibration.candidates import candidate_variants
from sagepatch.calibration.capture import LayerCalibration, refuse_capture
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.planning import entry_at
from sagepatch.calibration.table import LayerTable
from sagepatch.calibration.timing import CallTime
from sagepatch.errors import KernelUnavailable, MachineError
from sagepatch.ops import run_exact
from sagepatch.spec import AttnSpec, Call

HOPPER = AttnSpec(1, 24, 24, 4608, 4608, 128, 128, "bf16", "bf16", "cuda", 90)


def half(one: Call) -> Call:
    return replace(one, q=one.q.bfloat16(), k=one.k.bfloat16(), v=one.v.bfloat16())


def run(table: LayerCalibration, one, calls: int) -> None:
    for number in range(calls):
        table.observe(one, call(seed=number))


def test_the_first_second_fourth_and_eighth_call_are_measured() -> None:
    finished: list[int] = []
    one, table = layer(), LayerCalibration(Stopwatch())
    table.done = lambda settled: finished.append(table.calls)
    run(table, one, 9)
    assert table.samples == 4
    assert finished == [8]
    assert [row.call for row in table.rows] == [1, 2, 4, 8]
    assert all("emulated.sage2_8" in row.errors for row in table.rows)


# case 58
def test_a_calibration_without_end_goes_on_ever_more_rarely() -> None:
    table = LayerCalibration(Stopwatch())
    run(table, layer(), 33)
    assert [row.call for row in table.rows] == [1, 2, 4, 8, 16, 32]


def test_outputs_are_exact_and_kept_nowhere() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    given = call()
    out, _ = table.observe(one, given)
    assert torch.equal(out, run_exact(given)[0])
    held = [weakref.ref(tensor) for tensor in (given.q, given.k, given.v, out)]
    del given, out
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert table.samples == 1


# case 26
def test_the_largest_value_is_recorded() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    assert LayerTable("x", "self").max_abs_v is None
    given = call()
    given.v[0, 1, 5, 3] = -77.0
    table.observe(one, given)
    assert LayerTable("x", "self", tuple(table.rows)).max_abs_v == 77.0


# case 14
def test_single_queries_are_no_samples() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    for _ in range(5):
        table.observe(one, call(Sq=1))
    assert (table.calls, table.samples) == (0, 0)
    assert candidate_variants(call(Sq=1).spec(), one) == []


EMPTY = {
    "batch": {"B": 0},
    "query": {"Sq": 0},
    "key": {"Skv": 0},
    "head": {"H": 0},
}


# case 14
@pytest.mark.parametrize("size", EMPTY.values(), ids=EMPTY)
def test_calls_without_rows_are_no_samples(size: dict[str, int]) -> None:
    finished: list[int] = []
    one, table = layer(), LayerCalibration(Stopwatch())
    table.done = lambda settled: finished.append(table.calls)
    for _ in range(9):
        given = call(**size)
        out, _ = table.observe(one, given)
        assert out.shape == given.q.shape
    assert (table.calls, table.samples, finished) == (0, 0, [])
    # None of the sampled places is spent.
    run(table, one, 9)
    assert [row.call for row in table.rows] == [1, 2, 4, 8]
    assert finished == [8]


def spoilt(seed: int = 0, value: float = math.nan) -> Call:
    """A call whose exact output is not finite, in one row of one head."""
    given = call(seed=seed)
    given.q[0, 1, 7, 3] = value
    return given


# case 47
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("bad", "looked_at"), [({0}, 1), ({1}, 1), ({1, 2}, 2), ({0, 4, 8}, 2), ({7}, 1), ({2}, 0)]
)
def test_the_next_call_takes_the_place_of_one_that_was_not_finite(bad, looked_at, value) -> None:
    finished: list[int] = []
    one, table = layer(), LayerCalibration(Stopwatch())
    sound = layer(), LayerCalibration(Stopwatch())
    table.done = lambda settled: finished.append(table.calls)
    for number in range(8 + len(bad)):
        if number in bad:
            table.observe(one, spoilt(number, value))
        else:
            table.observe(one, call(seed=number))
            sound[1].observe(sound[0], call(seed=number))
    # Calls between the sampled ones are not looked at: they keep their number.
    assert table.spoilt == looked_at
    assert [row.call for row in table.rows] == [1, 2, 4, 8]
    assert finished == [8]
    assert all(errors.finite for row in table.rows for errors in row.errors.values())
    assert ("inputs of this layer were not finite" in one.record.notes) == bool(table.spoilt)
    entry = entry_at(table.table(one), 0.998, by_step=False)
    assert entry.variant == entry_at(sound[1].table(sound[0]), 0.998, by_step=False).variant
    assert entry.variant != "sdpa.exact"


def test_a_row_that_is_not_compared_spoils_a_sample_too(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "COMPARED_ROWS", 3)
    monkeypatch.setattr(measuring, "EMULATED_RUNS", 1)
    monkeypatch.setattr(measuring, "EMULATED_ROWS", 3)
    one, table = layer(), LayerCalibration(Stopwatch())
    table.observe(one, spoilt())
    assert (table.samples, table.spoilt) == (0, 1)


# case 47
def test_a_layer_whose_inputs_are_never_finite_settles_and_says_so() -> None:
    finished: list[int] = []
    one, table = layer(), LayerCalibration(Stopwatch())
    table.done = lambda settled: finished.append(table.samples)
    for number in range(capture.MOST_SPOILT + 1):
        table.observe(one, spoilt(number))
    assert finished == [0]
    entry = entry_at(table.table(one), 0.998)
    assert entry.variant == "sdpa.exact"
    assert entry.reason == "inputs of this layer were not finite: stays exact"


def test_a_calibration_without_end_looks_at_a_bounded_number_of_spoilt_calls() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    for number in range(capture.MOST_SPOILT + 1):
        table.observe(one, spoilt(number))
    # Then their places are spent, as those of any call: the 2nd, 4th, 8th ...
    assert table.spoilt == capture.MOST_SPOILT + 1
    table.observe(one, spoilt())
    assert table.spoilt == capture.MOST_SPOILT + 1
    table.observe(one, call())
    assert [row.call for row in table.rows] == [4]


def test_within_a_step_the_next_call_takes_the_place() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    with table.pace.running("a"), one.schedule.at(0, 4):
        table.observe(one, spoilt())
        table.observe(one, call())
    assert [(row.call, row.step) for row in table.rows] == [(1, 0)]
    assert table.table(one).runs == dict.fromkeys(("sdpa.exact", *table.rows[0].errors), ("a",))


def test_a_candidate_that_misses_a_sample_is_left_out() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())
    table.observe(one, call())
    del table.rows[0].errors["emulated.sage2_8"]
    table.observe(one, call())
    summaries = LayerTable("x", "self", tuple(table.rows)).candidates
    assert "emulated.sage2_8" not in summaries
    assert summaries["emulated.sage1_b"].samples == 2


# cases 58, 68
def test_a_candidate_that_does_not_fit_in_memory_costs_only_itself(monkeypatch) -> None:
    def hungry(variant, *rest):
        if variant.name == "emulated.sage2_8":
            raise torch.OutOfMemoryError("no room")
        return measuring.measured_rows(variant, *rest)

    monkeypatch.setattr(capture, "measured_rows", hungry)
    one, table = layer(), LayerCalibration(Stopwatch())
    given = call()
    out, _ = table.observe(one, given)
    assert torch.equal(out, run_exact(given)[0])
    assert "emulated.sage2_8" not in table.rows[0].errors
    assert "emulated.sage2_8" in table.rows[0].refused
    assert "emulated.sage1_b" in table.rows[0].errors
    assert "emulated.sage1_b" not in table.rows[0].refused
    assert one.record.notes == [
        f"emulated.sage2_8 did not fit in memory while measured: {given.spec()}"
    ]


def full(*given, **more):
    raise torch.OutOfMemoryError("no room")


# cases 58, 68
def test_a_comparison_that_does_not_fit_in_memory_costs_only_the_sample(monkeypatch) -> None:
    finished: list[int] = []
    one, table = layer(), LayerCalibration(Stopwatch())
    table.done = lambda settled: finished.append(table.calls)
    for name in ("errors_of", "all_finite"):
        monkeypatch.setattr(capture, name, full)
        given = call()
        out, _ = table.observe(one, given)
        assert torch.equal(out, run_exact(given)[0])
        monkeypatch.undo()
    told = f"{capture.DROPPED}: {given.spec()}"
    assert (table.samples, table.spoilt, one.record.notes) == (0, 0, [told])
    assert all(not runs for runs in table.runs.values())
    run(table, one, 6)
    assert ([row.call for row in table.rows], finished) == ([4, 8], [8])


# cases 58, 68
@pytest.mark.parametrize("part", ["statistics", "diagnosed"])
def test_what_only_explains_and_does_not_fit_in_memory_is_left_out(monkeypatch, part) -> None:
    monkeypatch.setattr(capture, part, full)
    one, table = layer(), LayerCalibration(Stopwatch())
    table.observe(one, call())
    (row,) = table.rows
    assert (row.statistics is None) == (part == "statistics")
    assert "emulated.sage2_8" in row.errors
    assert table.remedies == ()
    (told,) = one.record.notes
    assert "did not fit in memory" in told


# case 47
def test_a_candidate_that_does_not_compile_costs_only_itself(monkeypatch) -> None:
    def uncompilable(variant, *rest):
        if variant.name == "emulated.sage2_8":
            raise KernelUnavailable("emulated.sage2_8 does not compile for this GPU")
        return measuring.measured_rows(variant, *rest)

    monkeypatch.setattr(capture, "measured_rows", uncompilable)
    one, table = layer(), LayerCalibration(Stopwatch())
    table.observe(one, call())
    assert "emulated.sage2_8" not in table.rows[0].errors
    assert "emulated.sage1_b" in table.rows[0].errors
    assert one.record.notes == ["emulated.sage2_8 does not compile for this GPU"]


# case 47
def test_a_candidate_that_raises_is_named(monkeypatch) -> None:
    def broken(variant, *rest):
        raise RuntimeError("boom")

    monkeypatch.setattr(capture, "measured_rows", broken)
    table = LayerCalibration(Stopwatch())
    with pytest.raises(RuntimeError, match="boom") as caught:
        table.observe(layer(), call())
    assert "measured in layer blocks.0.attn" in caught.value.__notes__[0]
    assert table.samples == 0
    # The lock is free again: the next call is not skipped.
    monkeypatch.undo()
    table.observe(layer(), call())
    assert table.samples == 1


def test_open_layers_are_not_captured_in_a_graph(monkeypatch) -> None:
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    on_gpu = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", 0)))
    with pytest.raises(MachineError, match=r"blocks\.0\.attn still calibrates.*patch\.lock\(\)"):
        refuse_capture(layer(), on_gpu, "still calibrates")
    refuse_capture(layer(), call(), "still calibrates")
    capturing = False
    refuse_capture(layer(), on_gpu, "still calibrates")


def test_times_cost_a_few_calls_a_kernel_not_a_few_a_layer(monkeypatch) -> None:
    timed: list[str] = []

    def clock(*_) -> CallTime:
        timed.append("run")
        return CallTime(10.0, 0.0)

    monkeypatch.setitem(measuring.TIMERS, "cpu", clock)
    # A kernel that is no emulation but runs here: what a CPU makes of a GPU's.
    real = replace(BY_NAME["emulated.sage2_8"], toolchain="triton")
    monkeypatch.setattr(candidates, "CATALOGUE", (real,))
    watch = Stopwatch()
    tables = [LayerCalibration(watch) for _ in range(6)]
    for number in range(8):
        for index, table in enumerate(tables):
            table.observe(layer(str(index), emulate=False), half(call(seed=number)))
    assert len(timed) == 2 * measuring.ROUNDS
    rows = [row for table in tables for row in table.rows]
    assert all(row.us_exact == 10.0 for row in rows)
    assert all(row.errors["triton.sage2_8"].us == 10.0 for row in rows)


# Once wrong: the report of another thread ended in "dictionary changed size during iteration".
def test_a_table_is_made_while_another_thread_takes_a_sample() -> None:
    one, table = layer(), LayerCalibration(Stopwatch())

    class Meanwhile(dict):
        def values(self):
            table.runs.setdefault("emulated.sage2_8", {})[1] = "a"
            return super().values()

    table.runs["sdpa.exact"] = Meanwhile({1: "a"})
    assert table.table(one).runs["sdpa.exact"] == ("a",)


def test_non_finite_values_reach_no_plan() -> None:
    # Values behind a mask: the output is finite whatever they are.
    rows = tuple(sample(n, {"emulated.sage2_8": 0.9995}, v_max=math.inf) for n in (1, 2))
    made = entry_at(LayerTable("x", "self", rows), 0.998)
    assert made.max_abs_v is None
    assert made.variant == "emulated.sage2_8"
