"""What benchmarks/h200_counters.py reads from the words of Nsight Compute."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.h200_counters import COLUMNS, COUNTERS, DURATION, columns, counted, number, sizes

ROOT = Path(__file__).resolve().parents[2]
NAMES = [DURATION, *(names[0] for names in COUNTERS.values())]


def said(*kernels: dict[str, str], names: list[str] = NAMES) -> list[str]:
    """What ncu writes with `--page raw --csv`: words of its own, names, units, a line a kernel."""
    rows = [["ID", *names], ["", *("%" for _ in names)]]
    rows += [
        [str(at), *(kernel.get(name, "1") for name in names)] for at, kernel in enumerate(kernels)
    ]
    return ["==PROF== Connected", *(",".join(f'"{cell}"' for cell in row) for row in rows)]


def test_the_longest_kernel_counts() -> None:
    long, short = ({DURATION: ms, NAMES[1]: of} for ms, of in (("1,234.5", "52.801"), ("999", "1")))
    found = columns(counted(said(short, long, short)))
    assert list(found) == list(COUNTERS)
    assert found["tensor_pct"] == "52.80"
    assert found["registers"] == "1"
    assert found["stall_mio"] == "1.00"


def test_another_name_of_a_counter_serves_and_what_is_missing_stays_empty() -> None:
    other = COUNTERS["issue_pct"][1]
    found = columns(counted(said({other: "55.1"}, names=[DURATION, other])))
    assert found["issue_pct"] == "55.10"
    assert found["tensor_pct"] == ""


def test_nothing_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        counted(said())
    with pytest.raises(ValueError, match="no kernel"):
        counted(["==ERROR== ERR_NVGPUCTRPERM"])
    assert number("n/a") == 0.0


def test_columns_are_those_of_the_table() -> None:
    with (ROOT / "benchmarks" / "h200_counters.csv").open(newline="", encoding="utf-8") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    assert sizes("1x33x8192x64") == (1, 33, 8192, 64)
