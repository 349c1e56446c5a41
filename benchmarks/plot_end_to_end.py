"""Draws benchmarks/h200_end_to_end.png from the measurements beside it.

python benchmarks/plot_end_to_end.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
# Beginning of the mode in the measurements, label, colour.
BARS = (
    ("calibrated", "calibrated", "#2a8f68"),
    ("safe", "safe tier everywhere", "#7fc5a4"),
)


def main() -> None:
    """Write the picture."""
    with (HERE / "h200_end_to_end.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str], dict[str, str]] = {}
    unpatched: dict[str, float] = {}
    for row in rows:
        name = row["model"] + (", compiled" if row["compile"] == "True" else "")
        if row["mode"] == "unpatched":
            unpatched[name] = float(row["ms_median"])
        found[name, row["mode"].partition(" ")[0]] = row
    names = sorted(unpatched, key=lambda name: float(found[name, "calibrated"]["speedup"]))
    figure, axes = plt.subplots(figsize=(9.5, 0.62 * len(names) + 1.2), dpi=110)
    height = 0.8 / len(BARS)
    for number, (mode, label, colour) in enumerate(BARS):
        for place, name in enumerate(names):
            row = found.get((name, mode))
            if row is None:
                continue
            y = place + ((len(BARS) - 1) / 2 - number) * height
            speed, predicted = float(row["speedup"]), float(row["predicted_speedup"])
            axes.barh(y, speed, height, color=colour, label=label if place == 0 else None)
            axes.plot([predicted], [y], "|", color="black", markersize=9)
            axes.annotate(
                f"{speed:.2f}", (max(speed, predicted) + 0.02, y), va="center", fontsize=7
            )
    axes.plot([], [], "|", color="black", label="predicted from kernel times", linestyle="")
    axes.axvline(1, color="#7f8794", linewidth=1)
    labels = [f"{name}\n{unpatched[name]:.0f} ms unpatched" for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=7)
    axes.set_xlabel("speed of one forward; torch's default attention is 1")
    axes.set_title(
        f"One {rows[0]['gpu']}, bf16, random weights, no text encoder or VAE", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "h200_end_to_end.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
