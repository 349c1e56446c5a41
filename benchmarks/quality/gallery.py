"""The failure gallery: pictures of the demo pipeline under recipes and kernels that are wrong.

    python -m benchmarks.quality.gallery

Writes gallery.png and gallery.csv beside this file. Runs on a CPU, emulated, in FP32.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

import sagepatch
from benchmarks.quality import likeness, tables
from benchmarks.quality.demo import Studio
from benchmarks.quality.mistakes import mistakes
from sagepatch.demo import load_pipeline

CAPTIONS = ("a red apple", "a bullet train", "a tiger")
RIGHT = "sage2_8"
PIXELS_AN_INCH = 110


def main() -> None:
    """Draw, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.HERE)
    options = parser.parse_args()
    about = tables.provenance("python -m benchmarks.quality.gallery")
    studio = Studio(load_pipeline(), torch.device("cpu"), CAPTIONS, 1)
    exact = studio.batch(0, studio.count)[1]
    columns = [("exact", "unpatched", exact)]
    with sagepatch.apply(studio.pipe, variant=f"emulated.{RIGHT}"):
        columns.append((RIGHT, "a recipe of ours", studio.batch(0, studio.count)[1]))
    for mistake in mistakes():
        with sagepatch.apply(studio.pipe, variant="exact", guard="off") as patch:
            for layer in patch.layers:
                layer.choose = lambda spec, v=mistake.variant: (v, None)  # type: ignore[method-assign]
            columns.append((mistake.name, mistake.story, studio.batch(0, studio.count)[1]))
        print(mistake.name, flush=True)
    rows = []
    for name, story, pictures in columns:
        noise = likeness.psnr_db(pictures, exact).tolist()
        alike = likeness.ssim(pictures, exact).tolist()
        rows += [
            {
                "column": name,
                "story": story,
                "caption": caption,
                "psnr_db": "equal" if math.isinf(db) else f"{db:.1f}",
                "ssim": f"{score:.4f}",
            }
            for caption, db, score in zip(CAPTIONS, noise, alike, strict=True)
        ]
    tables.write(options.out / "gallery.csv", rows, about)
    draw(options.out / "gallery.png", columns, rows)


def draw(
    path: Path, columns: list[tuple[str, str, torch.Tensor]], rows: list[dict[str, str]]
) -> None:
    """A row a caption, a column a recipe; PSNR under each picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(CAPTIONS), len(columns), figsize=(1.35 * len(columns), 1.62 * len(CAPTIONS) + 0.3)
    )
    for at, (name, _, pictures) in enumerate(columns):
        for row, caption in enumerate(CAPTIONS):
            axis = axes[row, at]
            axis.imshow(pictures[row].permute(1, 2, 0).numpy())
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
            found = rows[at * len(CAPTIONS) + row]["psnr_db"]
            axis.set_xlabel("" if found == "equal" else f"{found} dB", fontsize=7)
            if row == 0:
                axis.set_title(name.replace(", ", ",\n"), fontsize=7.5)
            if at == 0:
                axis.set_ylabel(caption, fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=PIXELS_AN_INCH)


if __name__ == "__main__":
    main()
