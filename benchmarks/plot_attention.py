"""Draws benchmarks/h200_attention.png from the measurements beside it.

python benchmarks/plot_attention.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
# Name in the measurements, label, colour.
BARS = (
    ("sdpa_flash2", "FlashAttention-2", "#b9bec7"),
    ("sdpa_cudnn", "torch default (cuDNN, bf16)", "#7f8794"),
    ("sageattention_1_0_6", "SageAttention 1.0.6", "#d9b777"),
    ("triton.sage2_8b_k128", "ours, Triton, fast (sage2_8b_k128)", "#a9b8e0"),
    ("cuda.sage1_b_f32", "ours, CUDA, safe (sage1_b_f32)", "#b5dfc9"),
    ("cuda.sage2_8_bf16", "ours, CUDA, safe (sage2_8_bf16), where timed", "#7fc5a4"),
    ("cuda.sage2pp_8_d4", "ours, CUDA, fast (sage2pp_8_d4)", "#2a8f68"),
)


def main() -> None:
    """Write the picture."""
    with (HERE / "h200_attention.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    speeds = {(row["shape"], row["variant"]): float(row["tflops"]) for row in rows if row["tflops"]}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(figsize=(11, 4.2), dpi=110)
    width = 0.84 / len(BARS)
    timed = {shape: [one for one, *_ in BARS if (shape, one) in speeds] for shape in shapes}
    for number, (variant, label, colour) in enumerate(BARS):
        # What was not timed at a shape leaves no gap there.
        at, heights = [], []
        for place, shape in enumerate(shapes):
            if variant in timed[shape]:
                beside = timed[shape].index(variant) - (len(timed[shape]) - 1) / 2
                at.append(place + beside * width)
                heights.append(speeds[shape, variant])
        axes.bar(at, heights, width, label=label, color=colour)
        if number == len(BARS) - 1:
            for x, height in zip(at, heights, strict=True):
                axes.annotate(f"{height:.0f}", (x, height), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
    axes.set_ylabel("TFLOPS, whole call")
    axes.set_title("One NVIDIA H200, bf16 in and out, quantising included", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
    axes.set_ylim(0, 1.3 * max(speeds[key] for key in speeds if key[1] != "cudnn_fp8"))
    figure.tight_layout()
    figure.savefig(HERE / "h200_attention.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
