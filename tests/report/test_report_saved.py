"""A saved report read back, and files that are none: one sentence each, nothing trusted."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.report_rows import EXACT, RANGED, REPORT, ROW
from report.tables import report_of_table, table

from sagepatch.errors import InvalidArgument, ModelError
from sagepatch.report.pictures import Comparison
from sagepatch.report.render_json import load


def _saved(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "r.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_it_reads_back(tmp_path: Path) -> None:
    full = replace(REPORT, layers=(ROW, EXACT, RANGED)).with_run_time(3.5, 4.25)
    full.to_json(tmp_path / "r.json")
    again = load(tmp_path / "r.json")
    assert again == full
    assert again.to_html() == full.to_html()
    assert str(again) == str(full)


def test_what_was_no_number_reads_back_as_unknown(tmp_path: Path) -> None:
    replace(REPORT, layers=(replace(ROW, rel_l1=math.nan, rmse=math.inf),)).to_json(
        tmp_path / "r.json"
    )
    row = load(tmp_path / "r.json").layers[0]
    assert row.rel_l1 is row.rmse is None


@pytest.mark.parametrize("seed", [1, 3])
def test_its_measurements_read_back(seed: int, tmp_path: Path) -> None:
    full = report_of_table(table(seed, layers=3))
    full.to_json(tmp_path / "r.json")
    again = load(tmp_path / "r.json")
    assert again == full
    assert again.to_html() == full.to_html()
    assert again.calibration is not None
    assert again.calibration.plan(0.9991) == table(seed, layers=3).plan(0.9991)


def test_what_is_not_finite_decides_as_before(tmp_path: Path) -> None:
    full = report_of_table(table(1))
    full.to_json(tmp_path / "r.json")
    again = load(tmp_path / "r.json").calibration
    assert again is not None
    for threshold in (0.0, 0.99, 0.998, 0.9999):
        runs = [
            [one.variants for one in each.plan(threshold).entries] for each in (again, table(1))
        ]
        assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.update(schema=99), "schema 99"),
        (lambda table: table["layers"][0].pop("rows"), "no whole table"),
        (lambda table: table["layers"][0].update(site="elsewhere"), "layers that this report has"),
    ],
    ids=["schema", "rows", "site"],
)
def test_measurements_that_are_none(change: Any, said: str, tmp_path: Path) -> None:
    data = json.loads(report_of_table(table(1)).to_json())
    change(data["calibration"])
    with pytest.raises(ModelError, match=said):
        load(_saved(tmp_path, data))


def test_measurements_of_kernels_that_are_not_here(tmp_path: Path) -> None:
    text = report_of_table(table(1)).to_json()
    data = json.loads(text)
    data["calibration"] = json.loads(
        json.dumps(data["calibration"]).replace("triton.sage1_b_f32", "mlx.sage9")
    )
    made = load(_saved(tmp_path, data))
    assert made.calibration is None
    assert "no kernel is called mlx.sage9 here" in made.warnings[-1]
    made.to_html()


def test_the_first_schema_reads_on(tmp_path: Path) -> None:
    data = json.loads(replace(REPORT, layers=(ROW,)).to_json())
    data["schema"] = 1
    del data["exact_run_seconds"], data["calibration"]
    for name in ("worst_step", "ranges", "k_offset", "q_outlier", "p_entropy", "remedy"):
        del data["layers"][0][name]
    read = load(_saved(tmp_path, data))
    bare = replace(ROW, k_offset=None, q_outlier=None, p_entropy=None)
    assert read == replace(REPORT, layers=(bare,))


@pytest.mark.parametrize("same", [True, False], ids=["equal", "unequal"])
def test_picture_scores_read_back_without_pictures(same: bool, tmp_path: Path) -> None:
    a = np.arange(300, dtype=np.uint8).reshape(10, 10, 3) // 2
    b = a if same else a + np.uint8(3)
    pictures = Comparison.of([a, a], [a, b])
    REPORT.with_pictures(pictures).to_json(tmp_path / "r.json")
    again = load(tmp_path / "r.json").pictures
    assert again is not None
    assert again.sentence() == pictures.sentence()
    assert again.worst_pair is None
    assert pictures.sentence() in REPORT.with_pictures(again).to_html()
    with pytest.raises(InvalidArgument, match="no pictures"):
        again.save_side_by_side(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a JSON report"),
        ("[]", "report schema 'list'"),
        ('{"schema": 9}', "schema 9"),
        ('{"schema": 1}', "layers is no list"),
        ("[" * 100_000, "not a JSON report"),
        ('{"schema": 1, "x": ' + "[" * 900 + "]" * 900 + "}", "whole report"),
    ],
    ids=["cut", "list", "newer", "empty", "deep", "deep-within"],
)
def test_a_file_that_is_no_report(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        load(_saved(tmp_path, text))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path / "absent.json")
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "r.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="not a JSON report"):
        load(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cosine", "high", "cosine of a layer is 'high', needs float"),
        ("cosine", True, "cosine of a layer is True"),
        ("calls", 1.5, "calls of a layer is 1.5, needs int"),
        ("calls", None, "calls of a layer is None"),
        ("tier", "turbo", "tier is 'turbo', needs fast, safe, exact"),
        ("notes", "one", "notes of a layer is 'one'"),
        ("notes", [1], "notes of a layer"),
        ("ranges", 3, "ranges is no list"),
        ("ranges", [{"start": 0}], "a range lacks"),
        ("remedy", 1, "remedy of a layer is 1"),
        ("fallbacks", {"why": "often"}, "fallbacks of a layer"),
        ("name", 7, "name of a layer is 7, needs str"),
    ],
)
def test_values_of_the_wrong_type(field: str, value: object, said: str, tmp_path: Path) -> None:
    data = json.loads(REPORT.to_json())
    data["layers"][0][field] = value
    with pytest.raises(ModelError, match=said):
        load(_saved(tmp_path, data))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [3]},
        {"layers": {}},
        {"left": [{}]},
        {"machine": []},
        {"threshold": None},
        {"emulated": 1},
        {"warnings": [[]]},
        {"pictures": {"psnr_db": 3}},
        {"pictures": "good"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_parts_of_the_wrong_type(change: dict[str, object], tmp_path: Path) -> None:
    data = {**json.loads(REPORT.to_json()), **change}
    with pytest.raises(ModelError, match="not a whole report"):
        load(_saved(tmp_path, data))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "9" * 100_000},
        {"threshold": "9" * 100_000},
        {"layers": [{**asdict(ROW), "tier": "x" * 100_000}]},
        {"layers": [{**asdict(ROW), "cosine": ["x" * 100_000]}]},
    ],
    ids=["schema", "top", "tier", "layer"],
)
def test_what_a_file_holds_makes_no_page_of_an_error(change, tmp_path: Path) -> None:
    data = {**json.loads(REPORT.to_json()), **change}
    with pytest.raises(ModelError) as refused:
        load(_saved(tmp_path, data))
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("value", [1e308, 5e-324, -1e308, 0.0])
def test_numbers_at_the_end_of_the_range_can_be_shown(value: float, tmp_path: Path) -> None:
    """Once no page: a million times a run's seconds was no number that JSON has."""
    full = report_of_table(table(1)).with_run_time(1.0, 2.0)
    data = json.loads(full.to_json())
    data["run_seconds"] = data["exact_run_seconds"] = value
    for row in data["layers"]:
        row.update((name, value) for name, held in row.items() if isinstance(held, float))
    for shown in (data, {**data, "calibration": None}):
        made = load(_saved(tmp_path, shown))
        assert str(made)
        assert made.to_html(tmp_path / "r.html")
        made.to_json(tmp_path / "again.json")
        assert load(tmp_path / "again.json") == made


def test_fields_of_a_later_version_are_skipped(tmp_path: Path) -> None:
    data = json.loads(replace(REPORT, layers=(ROW,)).to_json())
    data["colour"] = "green"
    data["layers"][0]["colour"] = "green"
    assert load(_saved(tmp_path, data)).layers == (ROW,)


def test_a_saved_report_cannot_drive_the_terminal(tmp_path: Path) -> None:
    data = json.loads(REPORT.to_json())
    evil = "a\x1b]0;title\x07\u202e\ud800"
    data["model"] = data["layers"][0]["name"] = data["layers"][0]["reason"] = evil
    data["machine"] = {evil: [evil]}
    made = load(_saved(tmp_path, data))
    for text in (str(made), made.to_html()):
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\ud800"}
    made.plot(tmp_path / "r.png")
