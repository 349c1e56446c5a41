"""Draws benchmarks/h200_end_to_end.png from the measurements beside it.

python benchmarks/plot_end_to_end.py
"""

from __future__ import annotations

import matplotlib
from end_to_end_rows import CALIBRATED, HERE, SAFE, Measured, measured

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Mode, compiled, label, colour.
BARS = (
    (CALIBRATED, False, "calibrated", "#2a8f68"),
    (SAFE, False, "safe tier everywhere", "#7fc5a4"),
    (CALIBRATED, True, "calibrated, both compiled", "#2f6fb0"),
    (SAFE, True, "safe tier everywhere, both compiled", "#9fc3e6"),
)


def label(found: list[Measured]) -> str:
    """The name of a model, the layers that are kept, and what a forward takes."""
    name, _, kept = found[0].model.partition(" (")
    times = [f"{one.unpatched_ms:.0f} ms" + one.compiled * " compiled" for one in found]
    return f"{name}\n" + ", ".join([*([kept.rstrip(")")] if kept else []), *times])


def main() -> None:
    """Write the picture."""
    models: dict[str, list[Measured]] = {}
    for one in sorted(measured(), key=lambda one: one.compiled):
        models.setdefault(one.model, []).append(one)
    order = sorted(models.values(), key=lambda found: found[0].speedup())
    drawn = [bar for bar in BARS if any(one.compiled == bar[1] for f in order for one in f)]
    figure, axes = plt.subplots(figsize=(9.5, (0.26 * len(drawn) + 0.12) * len(order) + 1), dpi=110)
    height, named = 0.84 / len(drawn), set()
    for place, found in enumerate(order):
        for number, (mode, compiled, text, colour) in enumerate(drawn):
            one = next((one for one in found if one.compiled == compiled), None)
            if one is None or mode not in one.rows:
                continue
            y = place + ((len(drawn) - 1) / 2 - number) * height
            speed, predicted = one.speedup(mode), one.predicted(mode)
            axes.barh(y, speed, height, color=colour, label=None if text in named else text)
            axes.plot([predicted], [y], "|", color="black", markersize=7)
            end = max(speed, predicted) + 0.02
            axes.annotate(f"{speed:.2f}", (end, y), va="center", fontsize=7)
            named.add(text)
    axes.plot([], [], "|", color="black", label="predicted from kernel times", linestyle="")
    axes.axvline(1, color="#7f8794", linewidth=1)
    axes.set_yticks(range(len(order)), [label(found) for found in order], fontsize=7)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_xlabel("speed of one forward; torch's default attention is 1")
    gpu = order[0][0].rows["unpatched"]["gpu"]
    axes.set_title(f"One {gpu}, bf16, random weights, no text encoder or VAE", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(HERE / "h200_end_to_end.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
