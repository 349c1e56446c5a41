"""Writes tables of README.md and of docs/kernels-cuda.md from the measurements beside this file,
between their markers.

python benchmarks/readme_tables.py
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from end_to_end_rows import CALIBRATED, SAFE, Measured, measured

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
CUDA_PAGE = HERE.parent / "docs" / "kernels-cuda.md"
# The recipes worth a line: one or two of each kind, not every depth of accumulation.
SHOWN = ("sage2pp_8", "sage2_8", "sage2_8b", "sage2pp_4", "sage1_vt", "sage1_b", "sage1_t")
OURS = ("triton.", "cuda.", "cuda_mma.")
# Tokens from which the first lines of README.md speak of calls.
LONG = 4096


def headline() -> str:
    """What is gained on an H200, in a sentence."""
    tokens = {row["shape"]: int(row["sq"]) for row in _rows("h200_attention.csv")}
    calls = [
        speeds[_best(speeds)] / speeds["sdpa_cudnn"]
        for shape, speeds in _by_shape().items()
        if tokens[shape] >= LONG
    ]
    found = measured()
    forwards = [one.speedup() for one in found if not one.stays_exact()]
    exact = dict.fromkeys(f"`{one.name}` stays exact" for one in found if one.stays_exact())
    forwards_told = f"{min(forwards):.2f}x to {max(forwards):.2f}x"
    return (
        f"On one NVIDIA H200, beside torch's default attention: calls of {LONG:,} tokens and more "
        f"are {min(calls):.2f}x to {max(calls):.2f}x\nas fast, whole forwards (random weights) "
        f"{'; '.join([forwards_told, *exact])} ([tables](#what-runs-where))."
    )


def demo_recipes() -> str:
    """Error of the demo's picture by recipe."""
    rows = {row["recipe"]: row for row in _rows("demo_recipes.csv")}
    lines = ["| recipe | tier | PSNR, dB | SSIM |", "|---|---|---|---|"]
    for name in SHOWN:
        row = rows[name]
        lines.append(f"| `{name}` | {row['tier']} | {row['psnr_db_worst']} | {row['ssim_worst']} |")
    return "\n".join(lines)


def h200_attention() -> str:
    """Speed on an H200: torch's default, flash attention 2, and the fastest of ours."""
    lines = [
        "| shape | torch's default (cuDNN) | flash attention 2 | our fastest | over the default |",
        "|---|---|---|---|---|",
    ]
    for shape, speeds in _by_shape().items():
        best, default, flash = _best(speeds), speeds["sdpa_cudnn"], speeds["sdpa_flash2"]
        lines.append(
            f"| `{shape}`: {_size(shape)} | {default:.0f} | {flash:.0f} "
            f"| {speeds[best]:.0f} (`{best}`) | {speeds[best] / default:.2f}x |"
        )
    return "\n".join(lines)


def _by_shape() -> dict[str, dict[str, float]]:
    """TFLOPS by shape and name."""
    found: dict[str, dict[str, float]] = {}
    for row in _rows("h200_attention.csv"):
        if row["tflops"]:
            found.setdefault(row["shape"], {})[row["variant"]] = float(row["tflops"])
    return found


def _best(speeds: dict[str, float]) -> str:
    """The fastest kernel of ours."""
    return max((name for name in speeds if name.startswith(OURS)), key=speeds.__getitem__)


def _size(shape: str) -> str:
    """Batch x heads x tokens x head size."""
    row = next(row for row in _rows("h200_attention.csv") if row["shape"] == shape)
    heads = row["hq"] if row["hq"] == row["hkv"] else f"{row['hq']}/{row['hkv']}"
    causal = ", causal" if row["causal"] == "True" else ""
    return f"{row['b']}x{heads}x{row['sq']}x{row['d']}{causal}"


def cuda_speed() -> str:
    """The Hopper kernels beside their peers."""
    shown = {
        "cuda.sage2pp_8_d4": "`sage2pp_8_d4`",
        "cuda.sage2_8": "`sage2_8`",
        "cuda.sage2_8_bf16": "`sage2_8_bf16`",
        "cuda.sage1_b_f32": "`sage1_b_f32`",
        "sdpa_cudnn": "cuDNN bf16",
        "cudnn_fp8": "cuDNN FP8",
        "sageattention_1_0_6": "SageAttention 1.0.6",
    }
    # What is set against cuDNN: the faster one of each.
    ratios = {
        "FP8 V over cuDNN bf16": ("cuda.sage2pp_8_d4", "cuda.sage2_8"),
        "BF16 V over it": ("cuda.sage2_8_bf16",),
        "FP16 V over it": ("cuda.sage1_b_f32",),
    }
    rows = _rows("h200_attention.csv")
    speeds = {(row["shape"], row["variant"]): float(row["tflops"]) for row in rows}
    lines = [
        "| shape | " + " | ".join([*shown.values(), *ratios]) + " | commit |",
        "|---" * (len(shown) + len(ratios) + 2) + "|",
    ]
    for shape, commit in dict.fromkeys((row["shape"], row["commit"]) for row in rows):
        at = [speeds.get((shape, name)) for name in shown]
        cells = ["-" if x is None else f"{x:.0f}" for x in at]
        default = speeds[shape, "sdpa_cudnn"]
        for names in ratios.values():
            found = [speeds[shape, name] for name in names if (shape, name) in speeds]
            cells.append(f"{max(found) / default:.2f}x" if found else "-")
        lines.append(f"| {shape} | " + " | ".join([*cells, commit]) + " |")
    return "\n".join(lines)


def end_to_end() -> str:
    """Speed of whole forwards on an H200, as they are and compiled."""
    found = measured()
    lines = [
        "| model | forward, ms | calibrated | safe tier | compiled: forward, ms | calibrated |",
        "|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(one.model for one in found):
        by_compiled = {one.compiled: one for one in found if one.model == model}
        cells = [
            *_forward(by_compiled.get(False), CALIBRATED, SAFE),
            *_forward(by_compiled.get(True), CALIBRATED),
        ]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _forward(one: Measured | None, *modes: str) -> list[str]:
    if one is None:
        return ["-"] * (1 + len(modes))
    speeds = [one.told(mode) if mode in one.rows else "-" for mode in modes]
    return [f"{one.unpatched_ms:.0f}", *speeds]


TABLES = {
    README: {
        "headline": headline,
        "demo-recipes": demo_recipes,
        "h200-attention": h200_attention,
        "end-to-end": end_to_end,
    },
    CUDA_PAGE: {"cuda-speed": cuda_speed},
}


def filled(page: Path) -> str:
    """The page with every table as the measurements say."""
    text = page.read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(
            pattern, lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text, flags=re.DOTALL
        )
        if found != 1:
            raise SystemExit(f"{page.name} holds the markers of {name} {found} times, needs one")
    return text


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(filled(page), encoding="utf-8")
