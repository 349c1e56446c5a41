"""What docs/quality.md is put together from: tables in Markdown, and where numbers are from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.quality.tables import HERE, read

EXACT = "exact"

Rows = list[dict[str, str]]


def demo(part: str) -> str:
    """The demo pipeline's table: from a GPU, or where there is none from a CPU."""
    on_gpu = f"demo_{part}.csv"
    return on_gpu if (HERE / on_gpu).exists() else f"demo_cpu_{part}.csv"


def models() -> dict[str, str]:
    """The tables of layers that are there, by what a reader calls the model."""
    files = {
        "demo pipeline": demo("layers"),
        "language model": "language_layers.csv",
        "sentence encoder": "sentences_layers.csv",
    }
    return {label: name for label, name in files.items() if (HERE / name).exists()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def named(row: dict[str, str]) -> str:
    """A condition's name as the page writes it: recipes as code."""
    return f"`{row['condition']}`" if row["group"] == "recipe" else row["condition"]


def about(*files: str) -> str:
    """Where the numbers of some tables are from, each different source once."""
    found: dict[str, None] = {}
    for row in (row for name in files for row in read(HERE / name)):
        told = f"{row['device']}, {row['versions']}, commit {row['commit']}, `{row['command']}`"
        found.setdefault(told)
    listed = ", ".join(f"`benchmarks/quality/{name}`" for name in files)
    return f"*{listed}: {'; '.join(found)}.*"


def spread(row: dict[str, str], name: str, digits: int) -> str:
    """Mean and deviation with so many digits, and the worst."""
    mean, sd, worst = (float(row[f"{name}_{part}"]) for part in ("mean", "sd", "worst"))
    if math.isinf(mean):
        return "equal"
    return f"{mean:.{digits}f} ± {sd:.{digits}f} ({worst:.{digits}f})"


def by_condition(rows: Rows, key: str) -> dict[str, dict[str, dict[str, str]]]:
    """Rows by condition, in the order of the table, and by another column."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["condition"], {})[row[key]] = row
    return found
