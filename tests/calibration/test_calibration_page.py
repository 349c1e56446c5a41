"""docs/calibration.md says what the measurements say."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import calibration_page


def test_every_table_comes_from_the_measurements() -> None:
    text = calibration_page.PAGE.read_text(encoding="utf-8")
    assert calibration_page.filled(text) == text, "run python benchmarks/calibration_page.py"
