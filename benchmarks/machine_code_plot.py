"""Draws docs/machine-code.png: predicted ceilings, and what is left without overlap, by GPU.

python benchmarks/machine_code_plot.py
"""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")
from machine_code_page import PAGE, RATED, rows
from matplotlib import pyplot as plt


def main() -> None:
    """Draw the picture."""
    found = rows()
    figure, axes = plt.subplots(1, len(RATED), figsize=(13, 6))
    for gpu, place in zip(RATED, axes, strict=True):
        mine = [r for r in found if r["gpu"] == gpu.name and r["head_dim"] == "128"]
        mine.sort(key=lambda r: float(r["predicted_tops"]))
        names = [r["recipe"] for r in mine]
        place.barh(names, [float(r["predicted_tops"]) for r in mine], color="lightsteelblue")
        floor = [float(r["predicted_tops_without_overlap"]) for r in mine]
        place.barh(names, floor, color="steelblue")
        place.set(title=f"{gpu.name} ({gpu.target})", xlabel="TOPS")
        place.tick_params(axis="y", labelsize=8)
    figure.suptitle("Predicted, not measured. D = 128: ceiling (light) and without overlap (dark)")
    figure.tight_layout()
    figure.savefig(PAGE.with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
