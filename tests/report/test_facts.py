"""What the page and the plot are given: columns, worst heads, stops, shares; against the table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from report.report_rows import EXACT, REPORT, ROW
from report.tables import report_of_plan, report_of_table, table

from sagepatch.calibration.table import Calibration
from sagepatch.errors import InvalidArgument
from sagepatch.report.facts import errors_of_row, facts, steps_of, stops
from sagepatch.report.summary import shares
from sagepatch.report.tiles import lead, tiles, worst_row


def _facts(calibration: Calibration, threshold: float = 0.998) -> dict:
    found = facts(report_of_table(calibration, threshold))
    assert found is not None
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_worst_of_several_samples_of_a_step() -> None:
    one, other = table(1), table(1)
    layer = one.layers[0]
    name = layer.names[0]
    rows = []
    for row in other.layers[0].rows:
        errors = row.errors[name]
        cosine = (errors.cosine[0] - 1e-3, *errors.cosine[1:])
        worse = replace(errors, cosine=cosine, norm_ratio=(0.1, *errors.norm_ratio[1:]))
        rows.append(replace(row, call=row.call + 100, errors={**row.errors, name: worse}))
    both = replace(layer, rows=(*layer.rows, *rows))
    shown = _facts(replace(one, layers=(both,)))["layers"][0]["steps"][name]
    assert len(shown) == len(layer.rows)
    for cell, first, second in zip(shown, layer.rows, rows, strict=True):
        pair = (first.errors[name], second.errors[name])
        assert cell["cosine"] == round(min(min(one.cosine) for one in pair), 7)
        assert cell["norm_ratio"] == 0.1
        heads = zip(pair[0].cosine, pair[1].cosine, strict=True)
        assert cell["heads"] == [round(min(two), 7) for two in heads]
        assert cell["cosine"] == cell["heads"][cell["worst_head"]]


def test_what_is_not_finite_is_null_and_decides_as_it_did() -> None:
    layer = _facts(table(1))["layers"][3]
    broken = [c for cell in layer["cells"] for c in cell["candidates"] if not c["finite"]]
    assert broken
    assert all(one["rel_l1"] is None for one in broken)


def test_columns_are_steps_percentages_or_calls() -> None:
    alone = table(1, steps=4)
    assert [step.name for step in steps_of(alone.layers)] == [f"step {n}" for n in (1, 2, 3, 4)]
    mixed = steps_of((*alone.layers, *table(1, steps=5).layers))
    assert [step.name for step in mixed] == [
        *("0 %", "25 %", "33.3 %", "50 %", "66.7 %", "75 %", "100 %"),
    ]
    placeless = steps_of((*alone.layers, *table(1, steps=None).layers))
    assert [step.name for step in placeless[4:]] == ["call 1", "call 2", "call 4", "call 8"]


def test_stops_hold_the_threshold_and_both_ends() -> None:
    found = stops(0.99731)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0.0, 1.01)
    assert {0.99731, 0.998, 0.9985, 0.99975, 0.9} <= set(found)
    assert all(len(repr(one)) <= 10 for one in found)


@pytest.mark.parametrize("steps", [28, None])
def test_errors_of_what_runs(steps: int | None) -> None:
    calibration = table(3, steps=steps)
    report = report_of_table(calibration)
    columns = steps_of(calibration.layers)
    for layer, row in zip(calibration.layers, report.layers, strict=True):
        found = errors_of_row(layer, row, columns)
        if row.tier == "exact":
            assert set(found) == {None}
        elif not row.ranges:
            assert found == [1 - min(one.errors[row.variant].cosine) for one in layer.rows]
        else:
            names = [
                part.variant for one in layer.rows for part in row.ranges if part.holds(one.at)
            ]
            pairs = zip(layer.rows, names, strict=True)
            assert found == [
                None if name == "sdpa.exact" else 1 - min(one.errors[name].cosine)
                for one, name in pairs
            ]


def test_the_page_begins_with_the_kind_of_plan_in_force() -> None:
    calibration = table(3)
    assert any(row.ranges for row in report_of_table(calibration).layers)
    assert _facts(calibration)["by_step"]
    flat = report_of_plan(calibration.plan(0.998, by_step=False)).with_calibration(calibration)
    found = facts(flat)
    assert found is not None
    assert not found["by_step"]


def test_a_calibration_of_another_model() -> None:
    with pytest.raises(InvalidArgument, match="layers that this report has not"):
        REPORT.with_calibration(table(1))


def test_no_table_no_facts() -> None:
    assert facts(REPORT) is None
    assert facts(REPORT.with_calibration(replace(table(1), layers=()))) is None


def test_shares_of_time() -> None:
    untimed = replace(ROW, us_exact=None)
    found = shares((ROW, replace(EXACT, calls_as_measured=14), untimed))
    assert found[0] == pytest.approx(331 * 28 / (331 * 28 + 442 * 14))
    assert found[1] == pytest.approx(1 - (found[0] or math.nan))
    assert found[2] is None
    assert shares(()) == []


def test_the_step_of_the_worst_call() -> None:
    calibration = table(1)
    for layer, row in zip(calibration.layers, report_of_table(calibration).layers, strict=True):
        if row.cosine is None or row.ranges:
            continue
        worst = min(layer.rows, key=lambda one: min(one.errors[row.variant].cosine))
        assert worst.step is not None
        assert row.worst_step == worst.step + 1


class TestTiles:
    """The first lines of the page."""

    def test_with_times(self) -> None:
        report = replace(REPORT, layers=(ROW, EXACT), left=())
        shown = {tile.what: tile for tile in tiles(report.with_run_time(0.1, 0.15))}
        assert shown["Layers quantised"].value == "1 of 2"
        assert shown["Worst layer's cosine"].value == "0.99931"
        assert "head 7, call 4" in shown["Worst layer's cosine"].how
        assert shown["Attention"].value == f"{884 / 773:.2f}x as fast"
        whole = shown["Whole run"]
        run_us = 28 * 773
        predicted = f"{(1e5 - run_us + 28 * 884) / 1e5:.2f}x predicted"
        assert whole.value == "1.50x measured"
        assert whole.how == f"{predicted}; attention is {run_us / 1e5:.0%} of it"
        alone = {tile.what: tile for tile in tiles(report.with_run_time(0.1))}
        assert alone["Whole run"].value == predicted
        assert alone["Whole run"].how.endswith("the exact run was not timed")
        # A run that is too short to hold its calls has no share.
        short = {tile.what: tile for tile in tiles(report.with_run_time(0.01, 0.012))}
        assert short["Whole run"].value == "1.20x measured"

    def test_without_times(self) -> None:
        rows = (replace(ROW, variant="emulated.sage2_8"), EXACT)
        (*_, last) = tiles(replace(REPORT, layers=rows, emulated=True))
        assert (last.what, last.value) == ("Speed", "not measured")
        assert "emulated" in last.how

    def test_a_lost_layer_is_not_the_worst(self) -> None:
        lost = replace(ROW, name="lost", cosine=0.5, replaced_by="Other")
        assert worst_row((lost, ROW, EXACT)) is ROW
        assert worst_row((EXACT,)) is None

    def test_the_rule_in_a_sentence(self) -> None:
        assert "fastest kernel measured here" in lead(REPORT)
        assert "0.998" in lead(REPORT)
        assert "first kernel by tier" in lead(replace(REPORT, emulated=True))
        asked = replace(REPORT, layers=(replace(ROW, samples=0),))
        assert "nothing was measured" in lead(asked)
