"""What benchmarks/h200_sanitizers.py reads from the words of compute-sanitizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from h200_sanitizers import FAULTS, row, wrong

CALLED = "called plain\ncalled causal\n"
FAULT = "control: keys end too early"
MANY = (
    "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 97734 errors\n"
    "========= ERROR SUMMARY: 97704 errors were not printed. Use --print-limit option to adjust\n"
)


@pytest.mark.parametrize(
    ("name", "said", "ended", "calls", "errors", "complete"),
    [
        ("sage2_8", f"{CALLED}========= ERROR SUMMARY: 0 errors\n", True, 2, 0, True),
        ("sage2_8", f"{CALLED}========= ERROR SUMMARY: 0 errors\n", False, 2, 0, False),
        ("sage2_8", CALLED, False, 2, 0, False),
        ("sage2_8", f"called plain\n{MANY}", True, 1, 97734, True),
        ("sage2_8", "========= Invalid __global__ read of size 16 bytes\n", False, 0, 1, False),
        (FAULT, MANY, False, 0, 97734, True),
        (FAULT, "", False, 0, 0, False),
        (
            "sage2_8",
            f"{CALLED}========= RACECHECK SUMMARY: 6 hazards displayed (6 errors, 0 warnings)\n",
            True,
            2,
            6,
            True,
        ),
    ],
)
def test_rows_say_what_the_tool_said(name, said, ended, calls, errors, complete):
    assert FAULT in FAULTS
    found = row("memcheck", name, said, ended)
    assert (found["calls"], found["errors"], found["complete"]) == (calls, errors, complete)


@pytest.mark.parametrize(
    ("recipe", "errors", "is_wrong"),
    [("sage2_8", 1, True), ("sage2_8", 0, False), (FAULT, 9, False)],
)
def test_a_word_on_a_kernel_is_wrong_and_one_on_a_fault_is_wanted(recipe, errors, is_wrong):
    assert wrong({"recipe": recipe, "errors": errors}) == is_wrong
