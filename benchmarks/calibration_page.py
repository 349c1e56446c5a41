"""Writes the tables of docs/calibration.md between their markers: what a calibration costs, what
short calls take, and how well the error model ranks.

    python benchmarks/calibration_page.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from page_text import table

from sagepatch.calibration.choose import pays

HERE = Path(__file__).parent
SDPA = "sdpa.exact"
STREAMS = ("alone_us", "busy_us", "idle_us")
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
        *("compiling, s", "steps measured", "kernels to choose from, the fewest of a layer"),
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


def short_calls() -> str:
    """Of each shape exact attention and the fastest quantised kernel: what calibration times, and
    what streams of such calls took.
    """
    groups: dict[str, list[dict[str, str]]] = {}
    for row in _rows("short_calls.csv"):
        groups.setdefault(row["shape"], []).append(row)
    found = []
    for shape, rows in groups.items():
        exact, *others = sorted(rows, key=lambda row: row["kernel"] != SDPA)
        best = min(others, key=_time)
        takes = best["kernel"] if pays(_time(best), _time(exact)) else SDPA
        for row in (exact, best):
            told = (f"{float(row[name]):.0f}" for name in ("device_us", "host_us", *STREAMS))
            chosen = "yes" if row["kernel"] == takes else ""
            found.append((shape, row["kernel"], *told, chosen))
    head = ("calls", "kernel", "GPU, us", "host, us", "alone", "GPU busy", "host busy", "taken")
    return table(head, found)


def short_calls_told() -> str:
    """How far the time that decides is from what a stream took, by what decided."""
    off: dict[bool, list[float]] = {False: [], True: []}
    for row in _rows("short_calls.csv"):
        by_host = float(row["host_us"]) > float(row["device_us"])
        off[by_host].append(abs(_time(row) / float(row["alone_us"]) - 1))
    gpu, host = (f"{100 * max(off[key]):.0f} % ({len(off[key])} times)" for key in (False, True))
    return (
        "What the time that decides says and what a call took in a stream of 60 alone differ by at "
        f"most {gpu} where it is the GPU's, {host} where it is the host's."
    )


def _time(row: dict[str, str]) -> float:
    return max(float(row["device_us"]), float(row["host_us"]))


TABLES = {
    "cost": cost,
    "error model": error_model,
    "short calls": short_calls,
    "short calls told": short_calls_told,
}


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
