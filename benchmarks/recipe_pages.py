"""Writes docs/recipes/: one page a recipe, its maths, its layout in memory, what it costs and where
it is weak, from the recipe itself and the measurements beside this file.

    python benchmarks/recipe_pages.py
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.numerics.recipe import RECIPES, Recipe

HERE = Path(__file__).parent
FOLDER = HERE.parent / "docs" / "recipes"
PAPERS = {
    "sage1": "SageAttention (arXiv 2410.02367)",
    "sage2_": "SageAttention2 (arXiv 2411.10958)",
    "sage2pp": "SageAttention2++ (arXiv 2505.21136)",
}
FORMATS = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8", "e4m3": "E4M3"}
SHAPES = ("flux_1024", "d128_16k", "hunyuan_33k", "llama_8k_causal", "d64_16k", "cogvideox_2b")


def page(recipe: Recipe) -> str:
    """The page of one recipe."""
    paper = next(text for start, text in PAPERS.items() if recipe.name.startswith(start))
    parts = [
        f"# `{recipe.name}`",
        f"{_one_line(recipe)}. After {paper}. Tier `{recipe.tier}`"
        + (", by name only." if recipe.qk_bits == 4 else "."),
        "## Maths\n" + _maths(recipe),
        "## Layout\n" + _layout(recipe),
        "## What it costs\n" + _cost(recipe),
        "## Where it is weak\n" + "\n".join(f"- {line}" for line in _weak(recipe)),
        "[All recipes](README.md) · [the arithmetic](../numerics.md)",
    ]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The list of all pages."""
    lines = ["# Recipes", "", "| recipe | tier | what it does |", "|---|---|---|"]
    lines += [f"| [`{r.name}`]({r.name}.md) | {r.tier} | {_one_line(r)} |" for r in _pages()]
    lines += ["", "Notation and the maths they share: [the arithmetic](../numerics.md)."]
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """Every page by its file name."""
    return {"README.md": index(), **{f"{r.name}.md": page(r) for r in _pages()}}


def _pages() -> list[Recipe]:
    return [recipe for recipe in RECIPES.values() if not recipe.exact]


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _row_of(table: str, **wanted: str) -> dict[str, str]:
    """The first row of a table with these values."""
    for row in _rows(f"{table}.csv"):
        if wanted.items() <= row.items():
            return row
    raise SystemExit(f"{table}.csv has no row of {wanted}: run python benchmarks/{table}.py first")


def _groups(granularity: str, block: int, side: str) -> str:
    return {
        "token": f"one scale a {side}",
        "block": f"one scale for {block} of them",
        "thread": f"one scale for 16 of 64 {side}s, those with equal (index mod 8) div 2",
    }[granularity]


def _one_line(r: Recipe) -> str:
    flush = "" if r.keys_per_flush is None else f", flushed to FP32 every {r.keys_per_flush} keys"
    sums = {"fp32": "FP32", "fp16": "FP16", "int32": "INT32"}[r.accumulate]
    q = {"token": "per token", "block": "per block"}[r.q_granularity]
    k = {"token": "per token", "block": f"per {r.k_block} keys", "thread": "per thread group"}
    return (
        f"INT{r.qk_bits} Q ({q}) and K ({k[r.k_granularity]}), {FORMATS[r.pv]} P and V, "
        f"{sums} sums{flush}"
    )


def _maths(r: Recipe) -> str:
    lines = [
        f"K' = K - mean(K); Q{' - mean(Q) a block' if r.smooth_q else ' as it is'}. Codes:",
        "",
    ]
    lines += [
        "| operand | codes | groups |",
        "|---|---|---|",
        f"| Q | INT{r.qk_bits}, -{r.qk_max} to {r.qk_max} "
        f"| {_groups(r.q_granularity, r.q_block, 'query')} |",
        f"| K' | INT{r.qk_bits}, -{r.qk_max} to {r.qk_max} "
        f"| {_groups(r.k_granularity, r.k_block, 'key')} |",
    ]
    if r.pv == "fp16":
        lines += [
            "| P | FP16, P_r = 1 | static |",
            f"| V | FP16 | a power of two a channel where its largest number passes "
            f"{r.v_range:g} |",
        ]
    elif r.pv == "bf16":
        lines += [
            f"| P | BF16, P_r = 2^{math.log2(r.p_range):.0f}: sums of the largest V stay finite | "
            "static |",
            "| V | BF16 | as the caller gave it |",
        ]
    else:
        lines += [
            f"| P | {FORMATS[r.pv]}, P_r = {r.p_range:g} | static: after the running maximum "
            "1 is the largest |",
            f"| V | {FORMATS[r.pv]}, V_r = {r.v_range:g} | one scale a channel |",
        ]
    lines.append("")
    if r.keys_per_flush is not None:
        bound = r.keys_per_flush * r.p_range * r.v_range
        lines.append(
            f"P V is summed in FP16 over {r.keys_per_flush} keys ({r.depth} MMAs) and added to "
            f"FP32: {r.keys_per_flush} x {r.p_range:g} x {r.v_range:g} = {bound:g} stays under "
            "65504, so no sum overflows."
        )
    elif r.accumulate == "int32":
        lines.append("P V is summed in INT32, exactly, over one tile of keys and added to FP32.")
    else:
        lines.append(
            "P V is summed in FP32 over one tile of keys and added to a second FP32 sum, which "
            "keeps the short accumulator of the 8-bit tensor cores from adding up its bias."
            if r.pv == "e4m3"
            else "P V is summed in FP32."
        )
    if r.smooth_q:
        lines.append(
            "What smoothing Q removes, mean(Q) . K', is a number a key and query block: it is "
            "added to the scores in FP32 before the maximum."
        )
    return "\n".join(lines)


def _layout(r: Recipe) -> str:
    packed = r.qk_bits == 4
    if r.pv == "bf16":
        return (
            "`backends/cuda/prepass.py` documents it. V is read where the caller has it and never "
            "copied, but with a key mask, in packed calls and where a tensor map cannot describe "
            "it; the codes of Q are made by the attention itself."
        )
    v_bytes = 2 if r.pv == "fp16" else 1
    lines = [
        "As the Triton kernels keep it (`backends/triton/prepass.py`), D' and Dv' the head sizes "
        "padded to pieces of powers of two:",
        "",
        "| tensor | type, shape | bytes a token and head at D = 128 |",
        "|---|---|---|",
        "| Q codes | int8 [B, Hq, Sq, D']" + (" (4-bit values)" if packed else "") + " | 128 |",
        "| Q scales, times scale x log2(e) | fp32 [B, Hq, Sq] | 4 |",
        "| K codes | int8 [B, Hkv, Skv', D']" + (" (4-bit values)" if packed else "") + " | 128 |",
        "| K scales, one a key whatever the group | fp32 [B, Hkv, Skv'] | 4 |",
    ]
    shape = "[B, Hkv, Skv', Dv']" if r.pv == "fp16" else "[B, Hkv, Dv', Skv'], transposed"
    lines.append(f"| V codes | {FORMATS[r.pv].lower()} {shape} | {128 * v_bytes} |")
    lines.append("| V scales | fp32 [B x Hkv, Dv'] | 4 a channel |")
    if r.pv != "fp16":
        lines += [
            "",
            "Within each 16 keys V's position 4t + 2a + j holds key 8a + 2t + j: in this order the "
            "scores that a thread computed are the columns of P that it needs, and nothing is "
            "shuffled.",
        ]
    if packed:
        lines += [
            "",
            "The 4-bit values travel as INT8: the accuracy of INT4 everywhere, not its speed.",
        ]
    return "\n".join(lines)


def _cost(r: Recipe) -> str:
    normal = _row_of("numerics_table", experiment="normal data", setting=r.name)
    demo = _row_of("demo_recipes", recipe=r.name)
    lines = [
        f"Error on normal data, 1 x 4 x 1024 x 128, against FP64: relative L1 {normal['rel_l1']}, "
        f"cosine {normal['cosine']} ([csv](../../benchmarks/numerics_table.csv)). Demo picture "
        f"with this recipe in every layer: {demo['psnr_db_worst']} dB PSNR, worst of three prompts "
        "([csv](../../benchmarks/demo_recipes.csv), emulated on a CPU).",
        "",
    ]
    kernels = [v for v in CATALOGUE if v.recipe is r and v.toolchain != "emulated"]
    served = [v.toolchain for v in kernels if v.withheld is None]
    if kernels and not served:
        lines.append(f"`{kernels[0].name}` runs by its full name only: {kernels[0].withheld}.")
        return "\n".join(lines)
    if not served:
        lines.append("No GPU kernel computes it: it is emulated in plain torch.")
        return "\n".join(lines)
    for kernel in kernels:
        if kernel.tested_on:
            archs = ", ".join(f"sm_{arch}" for arch in sorted(kernel.archs or ()))
            lines += [
                f"`{kernel.name}` for {archs}: compiled, arithmetic checked on sm_90, not yet run "
                "there ([which goes first, and why](../kernels-mma.md)).",
                "",
            ]
    speeds: dict[str, dict[str, dict[str, str]]] = {}
    for row in _rows("h200_attention.csv"):
        speeds.setdefault(row["shape"], {})[row["variant"]] = row
    found = [
        (shape, toolchain, speeds[shape][f"{toolchain}.{r.name}"], speeds[shape]["sdpa_cudnn"])
        for shape in SHAPES
        for toolchain in served
        if f"{toolchain}.{r.name}" in speeds.get(shape, {})
    ]
    if not found:
        lines.append("Its kernel was tested on an H200; its speed is not in the measurements.")
        return "\n".join(lines)
    lines += [
        "One NVIDIA H200, whole call in bf16, quantising included "
        "([csv](../../benchmarks/h200_attention.csv) has command and versions):",
        "",
        "| shape | kernel | TFLOPS | of torch's default (cuDNN) | pre-pass, ms | whole, ms |",
        "|---|---|---|---|---|---|",
    ]
    for shape, toolchain, ours, exact in found:
        ratio = float(ours["tflops"]) / float(exact["tflops"])
        lines.append(
            f"| `{shape}` | {toolchain} | {float(ours['tflops']):.0f} | {ratio:.2f}x "
            f"| {float(ours['prepass_ms'] or 0):.3f} | {float(ours['ms_median']):.3f} |"
        )
    return "\n".join(lines)


def _weak(r: Recipe) -> list[str]:
    weak = []
    if r.qk_bits == 4:
        weak.append(
            "Four bits show: about 0.19 relative L1 on normal data, and in pictures. It runs only "
            "when asked for by name."
        )
    if "block" in (r.q_granularity, r.k_granularity):
        weak.append(
            "One token with a large number coarsens its whole block; per-token and per-thread "
            "scales contain it."
        )
    if r.k_granularity == "thread" and r.q_granularity == "token":
        weak.append(
            "The scale of K differs by column of the scores: one multiplication a score more than "
            "with block scales, and the maximum cannot be taken on integers."
        )
    if r.pv == "int8":
        weak.append(
            "Codes of P are 0 below 1/254 of the row's maximum, so the error grows with length "
            "(0.025 at 1k keys, 0.075 at 200k, as `sage1_vb`), and where V has a mean the mass of "
            "all small probabilities is lost."
        )
    if r.pv == "e4m3":
        weak.append("E4M3 rounds P to 3 bits: that is nearly all of its error, whatever the sums.")
    if r.pv == "fp16":
        weak.append(
            "FP16 values take twice the memory and half the tensor-core rate of 8-bit ones."
        )
    if r.pv == "bf16":
        weak.append(
            "BF16 values take twice the memory and half the tensor-core rate of 8-bit ones. It "
            "serves BF16 tensors only: for FP16 it would throw away three bits of V."
        )
    if r.accumulate == "fp16" and r.pv == "e4m3":
        weak.append(
            f"The product P_r x V_r is bounded: V has {r.v_range:g} where FP32 sums allow 448; "
            "channels whose numbers span more than E4M3's range meet subnormals sooner."
        )
    if r.k_block == 192:
        weak.append("Tiles of 192 keys: Triton's are powers of two, so only CUDA can serve it.")
    if not r.smooth_v:
        weak.append(
            "V is not smoothed: a mean of V that is large beside its spread costs accuracy."
        )
    return weak


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
