"""Writes docs/machine-code.md from machine_code.csv, the table of rates and what was measured: no
number has another source.

    python benchmarks/machine_code_page.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from gpu_rates import GPUS, Gpu
from page_text import filled
from page_text import table as markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "machine-code.md"
MEASURED = "H200"
# Those that a ceiling can be given for, and those whose rates are not published.
RATED = tuple(gpu for gpu in GPUS if gpu.name != MEASURED and not gpu.unrated)
UNRATED = tuple(gpu for gpu in GPUS if gpu.unrated)
# What one tensor-core fragment of scores is counted by: 16 queries of a warp against 64 keys.
SCORES = 16 * 64
TENSOR = {
    "s8": "INT8",
    "s4": "INT4",
    "f16->f16": "FP16, FP16 sums",
    "f16->f32": "FP16, FP32 sums",
    "e4m3->f16": "E4M3, FP16 sums",
    "e4m3->f32": "E4M3, FP32 sums",
}
UNITS = {
    "tensor": "tensor",
    "exponentials": "exponentials",
    "fma": "FP32 and half",
    "alu": "integer, logic, conversions",
    "shared": "shared memory",
    "issue": "instructions",
}
# One recipe of each kind of sums.
PLAIN = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_b_f32", "sage1_vb", "sage2pp_4", "sage2_4_f16")
Row = dict[str, str]


def rows(name: str = "machine_code.csv") -> list[Row]:
    """A table beside this file."""
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The page's text."""
    found = rows()
    rated = [r for r in found if r["gpu"] in {gpu.name for gpu in RATED}]
    parts = [_head(found), _rates(rated), _judged(rated), _targets(found)]
    parts += [_bounds(rated), _reading(found, rated)]
    return "\n\n".join(map(filled, parts)) + "\n"


def per_scores(row: Row, column: str) -> int:
    """A count of one tile as one of 16 queries and 64 keys."""
    return round(int(row[column]) * SCORES / int(row["rows"]) / int(row["keys"]))


def _head(found: list[Row]) -> str:
    *most, last = (gpu.target.rstrip("a") for gpu in GPUS if gpu.name != MEASURED)
    targets = f"{', '.join(most)} and {last}"
    return f"""
# Machine code and what it predicts

A static report on the CUDA kernels: compiled by NVRTC {found[0]["nvrtc"]} without a GPU, read back
by a disassembler, counted by unit. **Every TOPS on this page that is not marked measured is a
prediction.** The kernels for {targets}: compiled, arithmetic checked on sm_90,
not yet run there; [send us numbers](send-us-numbers.md) if you own one.

`python benchmarks/machine_code_report.py` compiles and counts
([csv](../benchmarks/machine_code.csv)), `python benchmarks/machine_code_page.py` writes this page,
`python benchmarks/machine_code_plot.py` draws. CI compiles the main kernels again and compares.

![Predicted ceilings by GPU and recipe](machine-code.png)
"""


def _rates(found: list[Row]) -> str:
    shown = RATED

    def tensor(gpu: Gpu, kind: str) -> str:
        return str(gpu.tensor[kind]) if kind in gpu.tensor else "none"

    lines: list[tuple[str, ...]] = [
        ("multiprocessors", *(str(gpu.multiprocessors) for gpu in shown)),
        ("boost clock, MHz", *(str(gpu.clock_mhz) for gpu in shown)),
        *((f"tensor, {told}", *(tensor(g, kind) for g in shown)) for kind, told in TENSOR.items()),
        ("FP32", *(str(gpu.fp32) for gpu in shown)),
        ("half pairs", *(str(gpu.half2) for gpu in shown)),
        ("integer additions", *(str(gpu.integer_add) for gpu in shown)),
        ("comparisons, logic, packed conversions", *("64" for _ in shown)),
        ("exponentials, int to float on sm_80", *("16" for _ in shown)),
        ("shared memory, bytes", *("128" for _ in shown)),
        ("instructions", *("128" for _ in shown)),
    ]
    head = ("a clock and multiprocessor", *(f"{gpu.name}, {gpu.target}" for gpu in shown))
    # On the unit of the exponentials, which has 16 lanes: two clocks an instruction.
    slower = [
        r
        for r in found
        if float(r["clocks_exponentials"]) + 2 * int(r["to_narrow"])
        > max(float(r[f"clocks_{unit}"]) for unit in UNITS)
    ]
    share = (
        "no ceiling below would be lower"
        if not slower
        else "the ceilings below would be lower for "
        + ", ".join(f"`{r['recipe']}` (D {r['head_dim']}, {r['gpu']})" for r in slower)
    )
    return f"""
## Rates

Operations of a tensor core, lanes of the other units. Tensor cores, multiprocessors and clocks are
those of NVIDIA's architecture papers (a test recomputes their peaks from them), arithmetic is that
of the CUDA C++ Best Practices Guide, "Throughput of Native Arithmetic Instructions". Two rates are
not published and taken from an H200, where we measured them: 64 packed conversions (F2FP) and 64
conversions of a half to FP32 (HADD2.F32). If packed conversions ran at the 16 a clock that the
guide lists for single ones on sm_120, {share}.

{markdown(head, lines)}

A unit's bound is what it alone would allow: operations of a tile of the main loop over the clocks
that the unit needs for it, at boost clock, all multiprocessors full. The **ceiling** is the least
of the bounds. **Without overlap** adds the tensor core and the busiest other unit, as if neither
worked beside the other.
"""


def _judged(found: list[Row]) -> str:
    judged = rows("machine_code_judged.csv")

    def share(r: Row) -> float:
        return float(r["measured_tflops"]) / float(r["predicted_tops_without_overlap"])

    lines = [
        (
            *(f"`{r['kernel']}`", r["head_dim"], r["predicted_tops"]),
            *(r["predicted_tops_without_overlap"], r["measured_tflops"], f"{share(r):.2f}"),
        )
        for r in judged
    ]

    def span(family: str) -> str:
        shares = [share(r) for r in judged if r["kernel"].startswith(family)]
        return f"{min(shares):.2f} to {max(shares):.2f}"

    def commits(family: str) -> str:
        return ", ".join(
            dict.fromkeys(r["commit"] for r in judged if r["kernel"].startswith(family))
        )

    head = ("kernel", "D", "ceiling", "without overlap", "measured", "of without overlap")
    return f"""
## How good such a prediction is

The same count for kernels that have run, as they were when they were measured, TFLOPS on an H200 on
the faster of two long shapes ([csv](../benchmarks/machine_code_judged.csv)): Hopper's own
(`cuda.*`, attention alone, {commits("cuda.")}), and the `cuda_mma` kernels of this page whose
instructions Hopper has in hardware (whole calls, quantising included, {commits("cuda_mma.")}).

{markdown(head, lines)}

Measured speeds are {span("cuda.")} of the figure without overlap for Hopper's kernels,
{span("cuda_mma.")} for those of mma.sync, and far from the ceiling: the tensor core and the softmax
take registers and issue slots from each other. Where nobody has run the kernels expect about the
figure without overlap. The rate of mma.sync is 60 % of that of wgmma on an H200, so that
these kernels are slower there than torch's attention
([csv](../benchmarks/h200_mma_speed.csv)), and never chosen. SageAttention's paper
prints 340 TOPS at D = 64 on an RTX 4090 for its INT8 and FP16 kernel; the prediction for our
`sage1_b` there is {_between(found, "RTX 4090", "sage1_b", "64")}.
"""


def _between(found: list[Row], gpu: str, recipe: str, head_dim: str) -> str:
    r = next(r for r in found if (r["gpu"], r["recipe"], r["head_dim"]) == (gpu, recipe, head_dim))
    return f"{r['predicted_tops_without_overlap']} to {r['predicted_tops']}"


def _targets(found: list[Row]) -> str:
    parts = []
    head = (
        *("recipe", "D", "registers", "spilled, B", "shared, KiB", "warps", "instructions"),
        *("tensor", "exp", "convert", "shared loads", "bound by", "ceiling", "without overlap"),
    )
    for gpu in GPUS:
        if gpu.name == MEASURED:
            continue
        lines = []
        for r in found:
            if r["gpu"] != gpu.name:
                continue
            converted = sum(
                per_scores(r, name) for name in ("half_to_fp32", "to_narrow", "int_to_float")
            )
            tensor = per_scores(r, "tensor_integer") + per_scores(r, "tensor_float")
            lines.append(
                (
                    *(f"`{r['recipe']}`", r["head_dim"], r["registers"], r["stack_bytes"]),
                    *(round(int(r["shared_bytes"]) / 1024), r["warps"]),
                    *(per_scores(r, "instructions"), tensor, per_scores(r, "mufu"), converted),
                    *(per_scores(r, "shared_loads"), r["bound"], r["predicted_tops"]),
                    r["predicted_tops_without_overlap"],
                )
            )
        parts.append(f"### {gpu.name}, {gpu.target}\n\n{markdown(head, lines)}")
    tables = "\n\n".join(parts)
    unrated = "; ".join(gpu.unrated for gpu in UNRATED)
    return f"""
## The targets

`cuda_mma` kernels, no mask, not causal. Counts are instructions of one warp for 16 queries and 64
keys; `warps` a multiprocessor holds at once; ceilings in TOPS, predicted. No bound and no ceiling
("-") where rates are not published: {unrated}.

{tables}
"""


def _bounds(found: list[Row]) -> str:
    lines = [
        (r["gpu"], f"`{r['recipe']}`", r["head_dim"], *(r[f"tops_{unit}"] for unit in UNITS))
        for r in found
        if r["recipe"] in PLAIN
    ]
    return f"""
## The bound of each unit

TOPS that a unit alone would allow, predicted; the least of a row is its ceiling.

{markdown(("GPU", "recipe", "D", *UNITS.values()), lines)}
"""


def _reading(found: list[Row], rated: list[Row]) -> str:
    def best(gpu: str, head_dim: str) -> str:
        mine = [r for r in rated if r["gpu"] == gpu and r["head_dim"] == head_dim]
        # INT4 runs by name only.
        wide = [r for r in mine if "_4" not in r["recipe"]]
        top = max(wide, key=lambda r: float(r["predicted_tops_without_overlap"]))
        span = f"{top['predicted_tops_without_overlap']} to {top['predicted_tops']}"
        return f"`{top['recipe']}` ({span})"

    lines = [(gpu.name, best(gpu.name, "64"), best(gpu.name, "128")) for gpu in RATED]
    tight = [r for r in found if r["gpu"] == "A100" and r["bound"] == "shared"]
    named = ", ".join(dict.fromkeys(f"`{r['recipe']}`" for r in tight))
    queries = " or ".join(sorted({r["rows"] for r in tight}))
    shared = (
        "On an A100, whose tensor cores do twice as much a clock, shared memory binds "
        f"{named}: every warp, of {queries} queries, reads all of K and V."
        if tight
        else "Shared memory binds no kernel on an A100."
    )
    spilled = [
        f"`{r['recipe']}` D {r['head_dim']} {r['target']} ({r['stack_bytes']}, {r['local']})"
        for r in found
        if r["gpu"] != MEASURED and int(r["stack_bytes"])
    ]
    return f"""
## Reading it

The fastest recipe by GPU, predicted from figures without overlap to ceilings, TOPS, INT4 left out:

{markdown(("GPU", "D = 64", "D = 128"), lines)}

- On GeForce GPUs the tensor core is the bound of nearly all: products with FP32 sums run at half
the rate there, which is what FP16 sums (`sage1_*` on Ampere, `sage2pp_*` on Ada and Blackwell) win
back.
- {shared}
- Spilled registers, bytes a thread and accesses in the main loop: {", ".join(spilled) or "none"}.

[The mma.sync kernels](kernels-mma.md) · [ablations](ablations.md) · [send us
numbers](send-us-numbers.md)
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
