"""Which model types of transformers have a tiny model here, and what becomes of them: a table
(transformers_types.csv) of types, fates and the set of tests that they run in.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

_TABLE = Path(__file__).with_suffix(".csv")
# patched: every layer; by hand: no layer, and it says so; refused: masks would be lost.
FATES = ("patched", "by hand", "refused")


def model_types(fate: str) -> list[str]:
    """The model types (names of `transformers.AutoConfig`) with one fate."""
    assert fate in FATES
    return [row["model_type"] for row in _rows() if row["fate"] == fate]


def cases(fate: str) -> list[Any]:
    """The same as parameters of a test, those of the long matrix marked slow."""
    return [
        pytest.param(row["model_type"], marks=[pytest.mark.slow] if row["run"] == "slow" else [])
        for row in _rows()
        if row["fate"] == fate
    ]


def _rows() -> list[dict[str, str]]:
    with _TABLE.open(newline="") as file:
        return list(csv.DictReader(file))
