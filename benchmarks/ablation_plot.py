"""Draws docs/ablations.png from ablations.csv and ablations_gpu.csv: products, depths, splits, four
bits, row sums, kernels beside emulators.

python benchmarks/ablation_plot.py
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("agg")
from ablation_page import PAGE
from ablation_tables import Ablations, rows
from matplotlib import pyplot as plt

NAMES = ("normal", "outliers", "demo", "peaked", "V + 3", "Q + 3")
COLOURS = dict(zip(NAMES, plt.colormaps["tab10"].colors, strict=False))
DEPTHS = (1, 2, 4)
SMOOTHED = {
    "INT4, neither": "none",
    "INT4, K smoothed": "K",
    "INT4, Q smoothed": "Q",
    "INT4, Q and K smoothed": "Q and K",
    "INT4, Q and K smoothed, rotated": "rotated too",
    "INT8, K smoothed": "INT8, K",
}


def products(axes: Any, found: Ablations) -> None:
    """Error over that at 2016, V_r falling and P_r falling."""
    for ablation, style in (("product, by V_r", "-"), ("product, by P_r", "--")):
        settings = [s for s in found.settings(ablation) if s != "2046.9"]
        for name in found.data(ablation):
            base = found.l1(ablation, "2016", name)
            axes.plot(
                [float(s) for s in settings],
                [found.l1(ablation, s, name) / base for s in settings],
                style,
                marker=".",
                color=COLOURS[name],
                label=name if style == "-" else None,
            )
    axes.set(
        xscale="log",
        xlabel="P_r x V_r (solid: V_r falls, dashed: P_r falls)",
        ylabel="rel. L1 over that at 2016",
        title="How low the product may go",
    )
    axes.legend()


def depths(axes: Any, found: Ablations) -> None:
    """What FP16 sums add by depth, and the whole error."""
    for name in found.data("depth"):
        each = [found.one("depth", f"depth {d}: 112, 4.5", name) for d in DEPTHS]
        apart = [float(r["rel_l1_to_fp32_sums"]) for r in each]
        axes.plot(DEPTHS, apart, "-o", color=COLOURS[name], label=f"{name}: FP16 sums alone")
        axes.plot(DEPTHS, [float(r["rel_l1"]) for r in each], ":", color=COLOURS[name])
    axes.set(
        yscale="log",
        xticks=DEPTHS,
        xlabel="depth (dotted: whole error)",
        ylabel="rel. L1",
        title="What the FP16 buffer adds",
    )
    # Under all curves there is room.
    axes.set_ylim(bottom=3e-6)
    axes.legend(fontsize=8, loc="lower center", ncols=2)


def splits(axes: Any, found: Ablations) -> None:
    """Error by split over that of the paper's."""
    settings = [s for s in found.settings("split") if "FP32" not in s]
    for name in found.data("split"):
        base = found.l1("split", "224, 4.5", name)
        heights = [found.l1("split", s, name) / base for s in settings]
        axes.plot(settings, heights, "-o", color=COLOURS[name], label=name)
    axes.tick_params(axis="x", rotation=30)
    axes.set(xlabel="P_r, V_r", ylabel="rel. L1 over that of (224, 4.5)", title="Splits of 1008")
    axes.legend()


def four_bits(axes: Any, found: Ablations) -> None:
    """Bars by what is smoothed."""
    across = found.data("INT4")
    width = 0.8 / len(across)
    for number, name in enumerate(across):
        at = [place + (number - 1.5) * width for place in range(len(SMOOTHED))]
        heights = [found.l1("INT4", s, name) for s in SMOOTHED]
        axes.bar(at, heights, width, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(SMOOTHED)), SMOOTHED.values(), rotation=15)
    axes.set(yscale="log", ylabel="rel. L1", title="INT4: what is smoothed")
    axes.legend(fontsize=8)


def row_sums(axes: Any, found: Ablations) -> None:
    """Error with the sum of codes over that with the sum of probabilities."""
    names = ("sage2pp_8", "sage2_8", "sage1_vb")
    across = found.data("row sum")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        ratios = [
            found.l1("row sum", f"{name}, sum of codes", data)
            / found.l1("row sum", f"{name}, sum of probabilities", data)
            for data in across
        ]
        axes.bar([place + (number - 1) * width for place in range(len(across))], ratios, width)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(across)), across, rotation=20)
    axes.set(yscale="log", ylabel="rel. L1, codes over probabilities", title="Row sum of codes")
    # Over all bars there is room.
    axes.set_ylim(top=12)
    axes.legend(["equal", *names], fontsize=8, loc="upper left", ncols=2)


def kernels(axes: Any, found: Ablations) -> None:
    """Every setting that a kernel computes, on an H200, beside its emulator."""
    made = [r for r in rows("ablations_gpu.csv") if r["kernel"] == "cuda_mma"]
    for name, colour in COLOURS.items():
        some = [r for r in made if r["data"] == name]
        axes.plot(
            [float(r["emulated_rel_l1"]) for r in some],
            [float(r["kernel_rel_l1"]) for r in some],
            "o",
            markersize=4,
            fillstyle="none",
            color=colour,
            label=name,
        )
    axes.axline((1e-3, 1e-3), (1, 1), color="grey", linewidth=0.8)
    axes.legend(fontsize=8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="rel. L1 of the emulator",
        ylabel="rel. L1 of the kernel, H200",
        title="Kernels beside their emulator",
    )


def main() -> None:
    """Draw the picture."""
    found = Ablations()
    figure, axes = plt.subplots(3, 2, figsize=(11, 12))
    panels = (products, depths, splits, four_bits, row_sums, kernels)
    for draw, place in zip(panels, axes.flat, strict=True):
        draw(place, found)
    figure.tight_layout()
    figure.savefig(PAGE.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
