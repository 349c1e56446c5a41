"""Draws the figures of docs/quality.md from the measurements beside this file.

    python -m benchmarks.quality.plots

Writes pictures.png, layers.png, and language.png where its tables are.
"""

from __future__ import annotations

import math
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.quality.page import demo, models
from benchmarks.quality.tables import HERE, read

GROUPS = {
    "exact": "#555555",
    "yardstick": "#555555",
    "plan": "#2a7f3f",
    "recipe": "#2b6cb0",
    "baseline": "#c0392b",
}
# Curves of every recipe would hide one another.
CURVES = {
    "calibrated plan": "#2a7f3f",
    "plan by accuracy alone": "#2a7f3f",
    "sage1_b": "#1f4e8c",
    "sage2_8": "#2b6cb0",
    "sage2pp_8": "#6aa6de",
    "sage2_4": "#8e5bb5",
    "naive INT8": "#c0392b",
    "E4M3 per tensor": "#e08e3c",
    "sage2_4 without smoothing": "#d3659b",
    "exact, another seed": "#555555",
    "exact in FP32": "#999999",
}
# Cosines are shown as decades of 1 - cosine.
BEST, WORST = 1e-7, 1e-1


def pictures() -> None:
    """PSNR of every condition, and the error over the denoising steps."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(11, 6))
    rows = [r for r in read(HERE / demo("pictures")) if math.isfinite(float(r["psnr_db_mean"]))]
    rows.sort(key=lambda row: row["group"] == "baseline")
    places = range(len(rows))
    bars.barh(
        places,
        [float(row["psnr_db_mean"]) for row in rows],
        xerr=[float(row["psnr_db_sd"]) for row in rows],
        color=[GROUPS[row["group"]] for row in rows],
        error_kw={"ecolor": "#222222", "elinewidth": 0.8, "capsize": 2},
    )
    bars.set_yticks(list(places), [row["condition"] for row in rows], fontsize=7.5)
    bars.invert_yaxis()
    counts = sorted({int(row["n"]) for row in rows})
    drawn = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    bars.set_xlabel(f"PSNR against exact, dB; mean and sd of {drawn} pictures", fontsize=9)
    bars.set_title("recipes (blue) and baselines (red)", fontsize=10)
    curves.set_title("error after each step", fontsize=10)
    by_name: dict[str, list[tuple[int, float]]] = {}
    for row in read(HERE / demo("steps")):
        if row["condition"] in CURVES and float(row["error_mean"]) > 0:
            at = int(row["step"]), float(row["error_mean"])
            by_name.setdefault(row["condition"], []).append(at)
    for name, points in by_name.items():
        curves.semilogy(*zip(*points, strict=True), marker=".", color=CURVES[name], label=name)
    curves.set_xlabel("denoising step")
    curves.set_ylabel("relative error of the latents")
    curves.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, "pictures")


def language() -> None:
    """What a condition costs in nats by length and by position, and what it recalls."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4))
    for axis, name, key, title, label in (
        (axes[0], "perplexity", "length", "Loss by length", "tokens of context"),
        (axes[1], "positions", "band_end", "Loss by position", "up to this token of 32k"),
    ):
        table = read(HERE / f"language_{name}.csv")
        _curves(axis, table, key)
        lengths = sorted({int(row[key]) for row in table})
        axis.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axis.set_title(title, fontsize=10)
        axis.set_yscale("symlog", linthresh=2e-3)
        axis.axhline(0, color="#555555", linewidth=0.8)
        axis.set_xlabel(label)
        axis.set_ylabel("loss less that of exact attention, nats")
    rows = [r for r in read(HERE / "language_recall.csv") if not r["band_end"]]
    kept = [r for r in rows if r["measure"] == "retrieval"]
    right = {int(r["length"]): 100 * float(r["mean"]) for r in kept if r["condition"] == "exact"}
    for name, colour in CURVES.items():
        points = [
            (int(r["length"]), *(100 * float(r[f"minus_exact{e}"]) for e in ("", "_low", "_high")))
            for r in kept
            if r["condition"] == name
        ]
        if points:
            x, y, low, high = (np.array(column) for column in zip(*points, strict=True))
            axes[2].errorbar(x, y, yerr=[y - low, high - y], color=colour, marker=".", capsize=2)
    axes[2].set_xscale("log", base=2)
    axes[2].axhline(0, color="#555555", linewidth=0.8)
    shown = [f"{length // 1024}k\n({value:.0f} %)" for length, value in right.items()]
    axes[2].set_xticks(list(right), shown)
    axes[2].set_title("Retrieval", fontsize=10)
    axes[2].set_xlabel("tokens of context (right by exact attention)")
    axes[2].set_ylabel("values retrieved, points more than by exact")
    axes[0].legend(fontsize=7, loc="upper left", ncols=2)
    axes[0].set_ylim(top=1.0)
    _save(figure, "language")


def _curves(axis: Any, rows: list[dict[str, str]], key: str) -> None:
    axis.set_xscale("log", base=2)
    for name, colour in CURVES.items():
        points = [
            (int(r[key]), *(float(r[f"minus_exact{end}"]) for end in ("", "_low", "_high")))
            for r in rows
            if r["condition"] == name
        ]
        if points:
            x, y, low, high = (np.array(column) for column in zip(*sorted(points), strict=True))
            axis.plot(x, y, color=colour, marker=".", label=name)
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def layers() -> None:
    """The worst head of every layer under every condition."""
    files = models()
    widths = [len({row["layer"] for row in read(HERE / name)}) for name in files.values()]
    figure, axes = plt.subplots(
        1, len(files), figsize=(2 + sum(widths) / 2.3, 6.4), width_ratios=widths
    )
    image = None
    first = read(HERE / next(iter(files.values())))
    names = list(dict.fromkeys(row["condition"] for row in first))
    for axis, (label, name) in zip(axes, files.items(), strict=True):
        rows = read(HERE / name)
        sites = list(dict.fromkeys(row["layer"] for row in rows))
        # A condition that a model was not looked at under stays blank.
        grid = np.full((len(names), len(sites)), np.nan)
        for row in rows:
            if row["condition"] in names:
                at = names.index(row["condition"]), sites.index(row["layer"])
                grid[at] = np.fmax(grid[at], 1 - float(row["cosine_worst_head"]))
        shown = np.log10(grid.clip(BEST, WORST))
        image = axis.imshow(shown, aspect="auto", cmap="magma", vmin=-7, vmax=-1)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [], fontsize=7.5)
        axis.set_xticks(range(len(sites)), range(len(sites)), fontsize=7.5)
        axis.set_title(label)
        axis.set_xlabel("attention layer")
    figure.colorbar(image, ax=list(axes), label="log10 of 1 - cosine, worst head and call")
    figure.savefig(HERE / "layers.png", dpi=110, bbox_inches="tight")


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(HERE / f"{name}.png", dpi=110)


if __name__ == "__main__":
    pictures()
    layers()
    if (HERE / "language_perplexity.csv").exists():
        language()
