"""The notebook: its code runs as it stands, and what it shows is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_every_cell_shows_what_it_made() -> None:
    for cell in cells("code"):
        assert cell["outputs"], text(cell)
        assert all(output["output_type"] != "error" for output in cell["outputs"])
        pictures = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        last = text(cell).strip().splitlines()[-1]
        assert len(pictures) == (last.split()[0] in ("exact", "picture", "both"))


def test_its_links_lead_somewhere() -> None:
    links = [
        link for cell in cells("markdown") for link in re.findall(r"\]\(([^)]*)\)", text(cell))
    ]
    assert len(links) >= 5
    for link in links:
        assert (NOTEBOOK.parent / link).exists(), link


@pytest.mark.slow
def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in cells("code"):
        exec(compile(text(cell), str(NOTEBOOK), "exec"), names)
    out = capsys.readouterr().out
    assert "the same picture as before the patch" in out
    assert "threshold 1.01: 0 of 11 layers quantised" in out
    assert names["planned"].tobytes() != names["exact"].tobytes()
    assert (names["folder"] / "report.html").stat().st_size > 10_000
