"""One report in every format: strict JSON that reads back, escaped HTML, a plain table, a plot."""

from __future__ import annotations

import builtins
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from sagepatch.errors import MachineError, ModelError
from sagepatch.patchers.site import Left
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.pictures import Comparison
from sagepatch.report.render_json import load

EVIL = "blocks.<script>alert('x')</script>&amp;"
ROW = LayerRow(
    name="blocks.0.attn",
    kind="joint",
    variant="triton.sage2_8",
    tier="fast",
    cosine=0.99931,
    rel_l1=0.0345,
    rmse=3.5e-3,
    norm_ratio=0.999,
    worst_head=7,
    us_exact=442.0,
    us_chosen=331.0,
    calls=28,
    quantised_calls=24,
    by_variant={"triton.sage2_8": 24, "sdpa.exact": 4},
    fallbacks={"short: a single query": 2},
    shape="1x24x4608x4608x128 bf16",
    mask="none",
    samples=4,
    reason="cosine 0.99931 in the worst head, 1.34x exact",
    replaced_by=None,
    notes=(),
)
LOST = replace(ROW, name=EVIL, replaced_by="SlicedAttnProcessor", cosine=math.nan, us_exact=None)
REPORT = Report(
    "FluxPipeline",
    (ROW, LOST),
    (Left("vae.mid.attn", "self", "head_dim is 512, needs 8 to 256"),),
    {"gpus": [{"name": "NVIDIA H200"}], "versions": {"torch": "2.11"}},
    0.998,
    False,
    ("blocks.0.attn: measured on one shape, has also run another",),
)


def _schema(value: object, schema: object, path: str = "report") -> None:
    """A check in the form of docs/report.md: types by name, `?` for null."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for key, inner in schema.items():
            assert key in value, f"{path}.{key} is missing"
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


LAYER = {
    "name": "str", "kind": "str", "variant": "str", "tier": "str", "cosine": "num?",
    "rel_l1": "num?", "rmse": "num?", "norm_ratio": "num?", "worst_head": "int?",
    "us_exact": "num?", "us_chosen": "num?", "calls": "int", "quantised_calls": "int",
    "by_variant": "obj", "fallbacks": "obj", "shape": "str?", "mask": "str", "samples": "int",
    "reason": "str", "replaced_by": "str?", "notes": ["str"],
}  # fmt: skip
SCHEMA = {
    "schema": "int", "model": "str", "headline": "str", "threshold": "num", "emulated": "bool",
    "warnings": ["str"], "pictures": "obj?", "layers": [LAYER],
    "left": [{"name": "str", "kind": "str", "reason": "str"}], "machine": "obj",
}  # fmt: skip


def test_json_follows_its_schema_and_reads_back(tmp_path: Path) -> None:
    text = REPORT.to_json(tmp_path / "r.json")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    _schema(data, SCHEMA)
    assert data["layers"][1]["cosine"] is None
    again = load(tmp_path / "r.json")
    assert again.layers[0] == ROW
    assert again.left == REPORT.left
    assert again.headline() == REPORT.headline()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not a JSON report"), ("[]", "report schema 'list'"), ('{"schema": 9}', "schema 9")],
)
def test_a_file_that_is_no_report(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ModelError, match=said):
        load(tmp_path / "r.json")
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path / "absent.json")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_html_is_one_safe_page() -> None:
    grey = np.full((8, 8, 3), 90, np.uint8)
    page = REPORT.with_pictures(Comparison.of([grey], [grey])).to_html()
    parser = _Tags()
    parser.feed(page)
    names = [tag for tag, _ in parser.tags]
    assert "script" not in names
    assert "link" not in names
    images = [attributes["src"] or "" for tag, attributes in parser.tags if tag == "img"]
    assert len(images) == 2
    assert all(source.startswith("data:image/png;base64,") for source in images)
    assert "default-src 'none'" in page
    assert "&lt;script&gt;" in page
    for text in ("triton.sage2_8", "0.99931", "NVIDIA H200", "SlicedAttnProcessor", "vae.mid.attn"):
        assert text in page


def test_the_table_says_what_matters() -> None:
    text = str(REPORT)
    assert "3 attention layers found, 2 patched (2 fast, 0 safe, 0 exact), 1 left alone" in text
    assert "1 no longer patched" in text
    assert "replaced by SlicedAttnProcessor" in " ".join(text.split())
    for part in ("0.99931", "442", "331", "24/28", "head_dim is 512", "2 calls ran exact"):
        assert part in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_any_terminal(width: int) -> None:
    from sagepatch.report.render_table import render_text

    assert max(len(line) for line in render_text(REPORT, width).splitlines()) <= width


def test_an_emulation_is_labelled() -> None:
    assert "accuracy, not speed" in str(replace(REPORT, emulated=True))
    assert "accuracy, not speed" in replace(REPORT, emulated=True).to_html()
    assert "accuracy, not speed" not in str(REPORT)


def test_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    REPORT.plot(tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match=r"sagepatch\[plot\]"):
        REPORT.plot(tmp_path / "again.png")


def test_unwritable_places(tmp_path: Path) -> None:
    for write in (REPORT.to_json, REPORT.to_html, REPORT.plot):
        with pytest.raises(MachineError, match="cannot write"):
            write(tmp_path / "no" / "r")
