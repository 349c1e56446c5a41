"""Writes the tables of docs/calibration.md between their markers: what a calibration costs, and how
well the error model ranks.

    python benchmarks/calibration_page.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from page_text import table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "calibration.md"


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cost() -> str:
    """The time of measuring over the run's own, by model and number of steps."""
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for row in _rows("calibration_cost.csv"):
        device = row["about"].split(",")[0]
        groups.setdefault((device, row["model"], int(row["steps"])), []).append(row)
    found = []
    for (device, model, steps), rows in groups.items():
        ratios = sorted(float(row["ratio"]) for row in rows)
        own = min(float(row["run_s"]) for row in rows)
        measured = max(len(row["measured_steps"].split()) for row in rows)
        shown = f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(ratios) > 1 else "")
        known = [float(row["compiling_s"]) for row in rows if row["compiling_s"]]
        compiled = f"{max(known):.1f}" if known else ""
        candidates = min(int(row["candidates"]) for row in rows)
        found.append((device, model, steps, f"{own:.2f}", shown, compiled, measured, candidates))
    head = (
        *("device", "model", "steps", "a generation, s", "measuring over it"),
        *("compiling, s", "steps measured", "kernels compared everywhere"),
    )
    return table(head, found)


def error_model() -> str:
    """Rank correlations of predicted and measured errors."""
    said = {
        "by layer": "demo pipeline: layers quantised throughout, at random",
        "by layer and part": "demo pipeline: layers in parts of the schedule, at random",
        "one part": "demo pipeline: all layers in one part of the schedule",
        "all": "demo pipeline: all of these",
    }
    pattern = re.compile(
        r"rank correlation (\S+) \(by worst heads (\S+)\), n (\d+); "
        r"measured over predicted (\S+) to (\S+),"
    )
    rows: list[tuple[str, ...]] = []
    for row in _rows("error_model.csv"):
        if told := pattern.match(row["plan"]):
            ranks, worst, n, low, high = told.groups()
            digits = (f"{float(one):.2f}" for one in (ranks, worst))
            rows.append((said[row["kind"]], n, *digits, f"{low} to {high}"))
    *conditions, last = _rows("quality/language_error_model.csv")
    length = int(conditions[0]["length"]) // 1024
    rows.append(
        (
            f"language model: recipes and baselines throughout, loss added at {length}k",
            str(len(conditions)),
            f"{float(last['predicted']):.2f}",
            "",
            "",
        )
    )
    head = ("plans", "n", "rank correlation", "by worst heads", "measured over predicted")
    return table(head, rows)


TABLES = {"cost": cost, "error model": error_model}


def filled(text: str) -> str:
    """The page with its tables as the measurements say."""
    for name, made in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda m, t=made: f"{m[1]}{t()}\n{m[2]}", text, flags=re.S)
        if found != 1:
            raise SystemExit(f"{PAGE.name} holds the markers of {name} {found} times, needs one")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
