"""Draws benchmarks/h200_end_to_end.png from the measurements beside it.

python benchmarks/plot_end_to_end.py
"""

from __future__ import annotations

import matplotlib
from end_to_end_rows import CALIBRATED, HERE, SAFE, UNPATCHED, Measured, measured

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Mode, label, colour.
BARS = (
    (CALIBRATED, "calibrated", "#2a8f68"),
    (SAFE, "safe tier everywhere", "#7fc5a4"),
)


def label(one: Measured) -> str:
    """The name of a model, the layers that are kept, and what a forward takes."""
    name, _, kept = one.model.partition(" (")
    told = ([kept.rstrip(")")] if kept else []) + ["both compiled"] * one.compiled
    return f"{name}\n" + ", ".join([*told, f"{one.unpatched_ms:.0f} ms unpatched"])


def main() -> None:
    """Write the picture."""
    order = sorted(measured(), key=lambda one: one.speedup())
    figure, axes = plt.subplots(figsize=(9.5, 0.58 * len(order) + 1), dpi=110)
    height, named = 0.8 / len(BARS), set()
    for place, one in enumerate(order):
        for number, (mode, text, colour) in enumerate(BARS):
            if mode not in one.rows:
                continue
            y = place + ((len(BARS) - 1) / 2 - number) * height
            speed, predicted = one.speedup(mode), one.predicted(mode)
            axes.barh(y, speed, height, color=colour, label=None if text in named else text)
            axes.plot([predicted], [y], "|", color="black", markersize=8)
            end = max(speed, predicted) + 0.02
            told = f"{speed:.2f}" + ", all layers exact" * one.stays_exact(mode)
            axes.annotate(told, (end, y), va="center", fontsize=7)
            named.add(text)
    axes.plot([], [], "|", color="black", label="predicted from kernel times", linestyle="")
    axes.axvline(1, color="#7f8794", linewidth=1)
    axes.set_yticks(range(len(order)), [label(one) for one in order], fontsize=7)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xlabel("speed of one forward; torch's default attention is 1")
    gpu = order[0].rows[UNPATCHED]["gpu"]
    axes.set_title(f"One {gpu}, bf16, random weights, no text encoder or VAE", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "h200_end_to_end.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
