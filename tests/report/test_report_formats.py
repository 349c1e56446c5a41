"""One report in every format: strict JSON, escaped HTML, a plain table, a plot, whole files."""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report.report_rows import EXACT, RANGED, REPORT, ROW
from report.tables import report_of_table, table

from sagepatch.errors import MachineError
from sagepatch.patchers.site import Left
from sagepatch.plan import PlanRange
from sagepatch.report.pictures import Comparison
from sagepatch.report.render_html import SHADES
from sagepatch.report.render_json import load
from sagepatch.report.render_table import render_text


def _pair(first: int = 90, second: int = 90) -> tuple[np.ndarray, np.ndarray]:
    ramp = np.arange(16, dtype=np.uint8)[:, None, None].repeat(16, 1).repeat(3, 2)
    return ramp + np.uint8(first), ramp + np.uint8(second)


def _schema(value: object, schema: object, path: str = "report") -> None:
    """A check in the form of docs/report.md: types by name, `?` for null, nothing undeclared."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        assert set(value) == set(schema), path
        for key, inner in schema.items():
            _schema(value[key], inner, f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for index, item in enumerate(value):
            _schema(item, schema[0], f"{path}[{index}]")
    else:
        kind = str(schema)
        if value is None:
            assert kind.endswith("?"), path
            return
        types = {"str": str, "num": (int, float), "int": int, "bool": bool, "obj": dict}
        assert isinstance(value, types[kind.rstrip("?")]), f"{path} is {value!r}, needs {kind}"
        assert isinstance(value, bool) == (kind == "bool"), path


RANGE = {
    "start": "num", "end": "num", "variant": "str", "numerics_version": "int", "reason": "str",
    "cosine": "num?", "rel_l1": "num?", "worst_head": "int?", "worst_call": "int?",
    "us_chosen": "num?", "alternatives": "obj",
}  # fmt: skip
LAYER = {
    "name": "str", "kind": "str", "variant": "str", "tier": "str", "cosine": "num?",
    "cosine_mean": "num?", "rel_l1": "num?", "rmse": "num?", "norm_ratio": "num?",
    "worst_head": "int?", "worst_call": "int?", "max_abs_v": "num?", "us_exact": "num?",
    "us_chosen": "num?", "calls": "int", "quantised_calls": "int", "calls_as_measured": "int",
    "by_variant": "obj", "fallbacks": "obj", "shape": "str?", "mask": "str?", "samples": "int",
    "measured_on": ["str"], "reason": "str", "replaced_by": "str?", "notes": ["str"],
    "worst_step": "int?", "ranges": [RANGE], "k_offset": "num?", "q_outlier": "num?",
    "p_entropy": "num?", "remedy": "str?",
}  # fmt: skip
COUNTS = ("found", "patched", "fast", "safe", "exact", "left", "lost")
ATTENTION = {
    "layers": "int", "calls": "int", "us_exact": "num", "us_chosen": "num", "gain": "num",
    "share": "num?", "run_gain": "num?", "measured_run_gain": "num?",
}  # fmt: skip
PICTURES = {"psnr_db": "num?", "ssim": "num", "frames": "int", "worst_frame": "int"}
SCHEMA = {
    "schema": "int", "model": "str", "headline": "str", "counts": dict.fromkeys(COUNTS, "int"),
    "threshold": "num", "emulated": "bool", "in_force": "bool", "warnings": ["str"],
    "run_seconds": "num?", "exact_run_seconds": "num?",
    "attention": ATTENTION, "pictures": PICTURES, "layers": [LAYER],
    "left": [{"name": "str", "kind": "str", "reason": "str"}], "machine": "obj",
    "calibration": "obj?",
}  # fmt: skip


def test_json_follows_its_schema() -> None:
    full = replace(REPORT, layers=(*REPORT.layers, EXACT, RANGED)).with_run_time(2.0, 2.5)
    text = full.with_pictures(Comparison.of(*([one] for one in _pair()))).to_json()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    _schema(data, SCHEMA)
    assert data["schema"] == 2
    assert data["attention"]["measured_run_gain"] == 1.25
    assert data["layers"][1]["cosine"] is None
    assert data["pictures"]["psnr_db"] is None
    bare = json.loads(replace(REPORT, layers=()).to_json())
    _schema(bare, {**SCHEMA, "attention": "obj?", "pictures": "obj?"})
    assert bare["attention"] is bare["pictures"] is bare["run_seconds"] is None


def test_the_documented_schema_is_the_checked_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {*SCHEMA, *LAYER}
    for inner in (*COUNTS, *ATTENTION, *PICTURES, *RANGE):
        assert f"`{inner}`" in text, inner


class _Page(HTMLParser):
    """The start tags and the shown text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_page_that_loads_and_runs_nothing() -> None:
    page = REPORT.with_pictures(Comparison.of(*([one] for one in _pair(90, 91)))).to_html()
    tags = _Page(page).tags
    assert {name for name, _ in tags}.isdisjoint({"script", "link", "iframe", "object", "form"})
    images = [attributes["src"] or "" for tag, attributes in tags if tag == "img"]
    assert len(images) == 3
    assert all(source.startswith("data:image/png;base64,") for source in images)
    policy = [a["content"] for t, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'; img-src data:;")
    assert "http://" not in page
    assert "https://" not in page
    handlers = [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert handlers == []


def test_html_escapes_every_text() -> None:
    evil = "\"'><img src=x onerror=alert(1)>"
    row = replace(
        ROW, name=evil, kind=evil, variant=evil, reason=evil, replaced_by=evil, notes=(evil,),
        fallbacks={evil: 1}, by_variant={evil: 1}, shape=evil, mask=evil, measured_on=(evil,),
        remedy=evil, ranges=(replace(RANGED.ranges[0], variant=evil, reason=evil),),
    )  # fmt: skip
    bad = replace(
        REPORT, model=evil, layers=(row, replace(row, replaced_by=None)),
        left=(Left(evil, "self", evil),), machine={evil: {evil: [evil]}}, warnings=(evil,),
    )  # fmt: skip
    shown = _Page(bad.to_html())
    assert not [tag for tag, _ in shown.tags if tag == "img"]
    assert shown.text.count(evil) > 15


def test_html_says_all() -> None:
    text = _Page(replace(REPORT, layers=(*REPORT.layers, EXACT, RANGED)).to_html()).text
    for part in (
        *("triton.sage2_8", "0.99931", "3.50e-03", "442", "331", "24/28", "1x24x4608x4608x128"),
        *("NVIDIA H200", "SlicedAttnProcessor", "vae.mid.attn", "needs 8 to 256", "number 4"),
        *("short: a single query", "no kernel is accurate enough", "12.5", "14.2", "9.5", "0.61"),
        *("triton.sage1_b to 87.5 %, sdpa.exact to 100 %", "step 28", "per-token scales: 0.9987"),
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("threshold", "cosine", "shade"),
    [
        (0.998, 1.0, 0),
        (0.998, 0.999, SHADES // 2),
        (0.998, 0.9, SHADES),
        (0.99, 0.995, SHADES // 2),
        (0.0, 0.999, SHADES // 2),
        (1.01, 0.999, SHADES // 2),
        (0.998, 1.0000001, 0),
    ],
)
def test_heat_is_relative_to_what_is_admitted(threshold: float, cosine: float, shade: int) -> None:
    rows = (replace(ROW, cosine=cosine), EXACT)
    page = replace(REPORT, layers=rows, left=(), threshold=threshold).to_html()
    rows_shown = page.split("<tbody>")
    first, second = (re.findall(r'<td class="n( h\d+)?">', row) for row in rows_shown[1:3])
    assert first[0] == f" h{shade}"
    assert second[:3] == ["", "", ""]


def test_html_of_a_video_shows_the_worst_frame() -> None:
    (a, b), (_, c) = _pair(90, 91), _pair(90, 130)
    report = REPORT.with_pictures(Comparison.of([a, a, a], [b, c, b]))
    assert "Picture 2 of 3, the one that differs most." in report.to_html()


def test_html_of_a_black_picture_says_so() -> None:
    a, _ = _pair()
    page = REPORT.with_pictures(Comparison.of([a], [np.zeros_like(a)])).to_html()
    assert "Look at it: the picture is black" in page


def test_the_table_says_what_matters() -> None:
    text = " ".join(str(REPORT).split())
    assert "3 attention layers found, 1 patched (1 fast, 0 safe, 0 exact), 1 left alone" in text
    assert "1 no longer patched" in text
    assert "replaced by SlicedAttnProcessor" in text
    for part in ("0.99931", "442", "331", "24/28", "head_dim is 512", "ran exact"):
        assert part in text
    assert " step " not in text
    assert "\x1b" not in text


def test_the_table_tells_steps_ranges_and_remedies() -> None:
    text = " ".join(render_text(replace(REPORT, layers=(ROW, RANGED)), 200).split())
    assert "head step us exact" in text
    assert "triton.sage2_8 by step 0.99831" in text
    assert "blocks.2.attn, over the schedule: triton.sage1_b to 87.5 %, sdpa.exact to 100 %" in text
    assert "0.99831 0.0345 7 28 442" in text
    assert "blocks.2.attn: per-token scales: 0.9987" in text


def test_a_reason_does_not_repeat_the_columns() -> None:
    where = "cosine 0.99931 in the worst head (call 4 (step 4 of 8))"
    rows = (replace(ROW, reason=f"{where}, 1.34x exact; triton.sage2pp_8 refused: (here), so"),)
    text = render_text(replace(REPORT, layers=rows), 200)
    assert "24/28  1.34x exact; triton.sage2pp_8 refused: (here), so" in text
    assert "in the worst head" not in text


@pytest.mark.parametrize("timed", [True, False], ids=["timed", "untimed"])
@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_the_table_fits_any_terminal(width: int, timed: bool) -> None:
    long = "transformer.single_transformer_blocks.{}.attn"
    rows = [
        replace(ROW, name=long.format(n), variant="triton.sage2_8b_k128", calls=1000 + n, reason="")
        for n in range(12)
    ]
    if not timed:
        rows = [replace(row, us_exact=None, us_chosen=None) for row in rows]
    lines = render_text(replace(REPORT, layers=tuple(rows)), width).splitlines()
    assert max(map(len, lines)) <= width
    # Numbers are never cut.
    joined = "\n".join(lines)
    assert joined.count("0.99931") == joined.count("0.0345") == 12
    assert all(f"24/{1000 + n}" in joined for n in range(12))
    assert joined.count(" 442 ") == (12 if timed else 0)


def test_short_names_leave_their_title_whole() -> None:
    rows = tuple(replace(ROW, name=str(n)) for n in range(2))
    assert "layer" in render_text(replace(REPORT, layers=rows), 80)


def test_equal_events_are_told_once() -> None:
    rows = tuple(replace(ROW, name=f"blocks.{n}.attn", notes=("compiled anew",)) for n in range(57))
    left = tuple(Left(f"vae.{n}", "self", "head_dim is 512") for n in range(9))
    text = render_text(replace(REPORT, layers=rows, left=left), 120)
    assert "blocks.0.attn and 56 more layers: 114 calls ran exact (short: a single query)" in text
    assert text.count("compiled anew") == 1
    assert text.count("head_dim is 512") == 1


def test_colours_only_in_a_terminal() -> None:
    from io import StringIO

    from rich.console import Console

    terminal, pipe = StringIO(), StringIO()
    Console(file=terminal, force_terminal=True, color_system="standard", width=120).print(REPORT)
    Console(file=pipe, width=120).print(REPORT)
    assert "\x1b[32m" in terminal.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_print_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(REPORT).splitlines())) <= 80


# Once wrong: a report of a patch that was taken back read as if it were in force.
def test_a_patch_that_was_taken_back_is_said_to_be_at_the_top_of_every_form(tmp_path) -> None:
    gone = replace(REPORT, in_force=False)
    said = "taken back, nothing of this patch is in force"
    lines = render_text(gone, 200).splitlines()
    assert said in lines[0]
    assert "the model's attention runs without it" in lines[1]
    page = gone.to_html()
    assert f"<h1>{gone.headline()}</h1>" in page
    assert said in gone.headline()
    assert "attention runs without it" in page
    data = json.loads(gone.to_json(tmp_path / "r.json"))
    assert (data["in_force"], said in data["headline"]) == (False, True)
    assert load(tmp_path / "r.json").headline() == gone.headline()
    assert said not in REPORT.headline() + REPORT.to_html() + render_text(REPORT)
    # Reports made before it was told.
    older = json.loads(REPORT.to_json())
    del older["in_force"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert load(tmp_path / "older.json").in_force


def test_an_emulation_is_labelled() -> None:
    row = replace(ROW, variant="emulated.sage2_8")
    emulated = replace(REPORT, layers=(row, EXACT), emulated=True)
    part = PlanRange(0.0, 1.0, "emulated.sage2_8", 1, "the first by tier")
    for told in (
        emulated,
        replace(emulated, emulated=False),
        replace(emulated, layers=(replace(EXACT, ranges=(part,)),)),
        replace(emulated, layers=(replace(EXACT, by_variant={"emulated.sage2_8": 3}),)),
    ):
        assert "accuracy, not speed" in str(told)
        assert "accuracy, not speed" in told.to_html()


def test_emulation_is_not_told_where_no_layer_is_emulated() -> None:
    """Once told of a run whose layers were all exact, as it might have emulated."""
    for untold in (REPORT, replace(REPORT, layers=(EXACT,), emulated=True)):
        for text in (str(untold), untold.to_html()):
            assert "accuracy, not speed" not in text
            assert "kernels are emulated" not in text


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        replace(REPORT, layers=()),
        replace(REPORT, layers=(EXACT,), threshold=1.01),
        replace(REPORT, threshold=0.0, emulated=True),
        replace(REPORT, layers=(replace(ROW, name=r"a$\frac{$b", us_exact=None),), model="$x_$"),
        replace(REPORT, layers=tuple(replace(ROW, name=f"b.{n}") for n in range(700))),
        report_of_table(table(1)),
        report_of_table(table(5, steps=None, timed=False), 1.01),
    ],
    ids=[
        *("usual", "empty", "all-exact", "threshold-0", "signs-of-formulas", "700-layers"),
        *("by-step", "by-call"),
    ],
)
def test_the_plot(report, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report.plot(tmp_path / "r.png")
    from PIL import Image

    width, height = Image.open(tmp_path / "r.png").size
    assert 1000 < width < 2300
    assert 200 < height < 20_000


def test_the_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match=r"pip install \"sagepatch\[plot\]\""):
        REPORT.plot(tmp_path / "again.png")


WRITERS = pytest.mark.parametrize("form", ["to_json", "to_html", "plot"])


@WRITERS
def test_unwritable_places(form: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place in ("no/r", "folder"):
        with pytest.raises(MachineError, match="cannot write"):
            getattr(REPORT, form)(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@WRITERS
def test_a_full_disk_leaves_the_old_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "r"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match="No space left on device"):
        getattr(REPORT, form)(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
