"""Writes docs/ablations.md from the measurements beside this file: no number has another source.

python benchmarks/ablation_page.py
"""

from __future__ import annotations

from pathlib import Path

from ablation_tables import Ablations, Row, rows
from page_text import filled
from page_text import table as markdown
from papers_page import papers

PAGE = Path(__file__).parents[1] / "docs" / "ablations.md"
MAIN = ("normal", "outliers", "demo")


def page() -> str:
    """The page's text."""
    found = Ablations()
    parts = (
        *(_head(found), _depth(found), _products(found), _splits(found), _four_bits(found)),
        *(_row_sums(found), _kernels(found), papers()),
    )
    return "\n\n".join(map(filled, parts)) + "\n"


DATA = {
    "normal": "standard normal Q, K, V, 1 x 4 x 1024 x 128, three seeds",
    "outliers": "the same; one entry of Q, K and V in a thousand deviates ten times as much, and "
    "all keys of a head share 16 times a normal vector",
    "demo": "Q, K and V of the bundled pipeline, a small trained Flux: 11 layers, three of eight "
    "steps, two prompts, {calls} calls of 1 x 3 x 1056 x 64",
    "peaked": "64 queries of twice the size on 8,192 normal keys: a high maximum, a long tail",
    "V + 3, Q + 3": "normal, V with a mean of 3; queries of a head plus 3 times a normal vector",
}
CHOICES = (
    (
        "depth of the FP16 buffer",
        "2 for `sage2pp_*`; 4 (`_d4`) beside it",
        "no depth costs accuracy that can be seen; a deeper buffer takes fewer instructions",
    ),
    (
        "P_r x V_r",
        "1008, the paper's",
        "anything from 2047 down to 252 is as good; the bound of the depth decides",
    ),
    (
        "split",
        "(224, 4.5), the paper's",
        "all splits from (448, 2.25) to (28, 36) give the same codes but for subnormals",
    ),
    (
        "INT4",
        "Q and K smoothed",
        "without K's mean it fails on outliers, without Q's where Q has one; still by name only",
    ),
    (
        "row sum",
        "of probabilities; of codes where the tensor core makes it",
        "with E4M3 codes are never worse and often better; with INT8 they are wrong",
    ),
)


def _head(found: Ablations) -> str:
    versions = found.rows[0]["versions"]
    calls = found.one("split", "224, 4.5", "demo")["calls"]
    sets = markdown(("data", "what it is"), ((n, d.format(calls=calls)) for n, d in DATA.items()))
    return f"""
# Ablations

What the FP8 and INT4 recipes choose, what each choice costs, and what the papers leave open. Every
number is relative L1 of the output against FP64, mean of the calls of a data set, from
[ablations.csv](../benchmarks/ablations.csv), which also has the worst head, cosine and norm ratio.
Made by `python benchmarks/ablations.py`, emulated on a CPU ({versions}): arithmetic, not speed.
`python benchmarks/ablations_gpu.py` repeats on an H200 what kernels compute of it: [the same to the
fourth digit](#the-same-on-kernels).
`python benchmarks/ablation_page.py` writes this page, `python benchmarks/ablation_plot.py` draws.

{sets}

{markdown(("choice", "what we chose", "why"), CHOICES)}

![Error by product, depth, split and smoothing](ablations.png)
"""


def _depth(found: Ablations) -> str:
    same = ("depth 1: 112, 4.5", "depth 2: 112, 4.5", "depth 4: 112, 4.5")
    across = found.data("depth")

    def apart(setting: str, name: str) -> float:
        return float(found.one("depth", setting, name)["rel_l1_to_fp32_sums"])

    sums = markdown(
        ("depth, at (112, 4.5) and tiles of 128 keys", *across),
        ((s.split(":")[0], *(f"{apart(s, name):.1e}" for name in across)) for s in same),
    )
    most = max(apart(same[2], name) for name in MAIN)
    share = min(found.l1("depth", same[2], name) / apart(same[2], name) for name in across)
    by_depth = " / ".join(found.one("depth", s, "V + 3")["rel_l1"] for s in same)
    return f"""
## Depth of the FP16 buffer: 1, 2, 4

The first three rows are the recipes, each at the largest ranges that its depth allows (P_r, V_r);
the next three hold ranges and tile still.

{found.table("depth")}

What FP16 sums alone change: relative L1 between the outputs with FP16 and with FP32 sums of the
same codes.

{sums}

- The rounding of the sums grows with depth. At depth 4 it is {most:.1e} at most on normal, outlier
and real data, and at most 1/{share:.0f} of the whole error on any: P's three bits are nearly all of
that. With sums as large as V + 3 makes them the whole error is {by_depth} at depth 1, 2, 4.
- `_d4` differs from the others by its tile of 128 keys (probabilities meet another maximum), not by
its depth: at one range and tile the three depths are equal to the fourth digit.
- A deeper buffer is converted less often, FP32 sums never, but their products run at half the rate.
Depth is not all that differs below: a warp takes 16 or 32 queries, and more queries share what is
read of K and V.
- So 2 stays what `sage2pp_*` means, as in the paper, and `_d4` is a candidate like any other:
calibration takes whichever is faster on the GPU at hand.

Instructions of one warp for 16 queries and 64 keys at D = 128, and what [machine
code](machine-code.md) predicts if no unit works beside another:

{_instructions()}
"""


def _instructions() -> str:
    """What the depths and four bits cost in instructions, from the static report."""
    report = {
        (r["gpu"], r["recipe"]): r for r in rows("machine_code.csv") if r["head_dim"] == "128"
    }
    names = {
        "sage2pp_8_d1": "depth 1",
        "sage2pp_8": "depth 2",
        "sage2pp_8_d4": "depth 4",
        "sage2_8": "FP32 sums",
        "sage2pp_4": "depth 2, INT4 and smoothed Q",
    }
    lines = []
    for gpu in ("RTX 4090", "RTX 5090"):
        for name, told in names.items():
            r = report.get((gpu, name))
            if r is None:
                continue

            def each(*columns: str, r: Row = r) -> str:
                scores = int(r["keys"]) * int(r["rows"])
                return f"{sum(int(r[column]) for column in columns) * 64 * 16 / scores:.0f}"

            lines.append(
                (
                    *(gpu, f"`{name}`", told, r["rows"], each("instructions")),
                    *(each("tensor_integer", "tensor_float"), each("mufu")),
                    each("half_to_fp32", "to_narrow", "int_to_float"),
                    *(each("shared_loads"), r["predicted_tops_without_overlap"]),
                )
            )
    return markdown(
        (
            *("GPU", "recipe", "sums", "queries", "instructions", "tensor", "exp", "convert"),
            *("shared loads", "TOPS without overlap"),
        ),
        lines,
    )


def _products(found: Ablations) -> str:
    by_v, by_p, base = "product, by V_r", "product, by P_r", "2016"

    def changes(ablation: str, setting: str) -> str:
        across = found.data(ablation)
        return ", ".join(f"{n} {found.change(ablation, setting, base, n)}" for n in across)

    mantissas = [
        found.l1("mantissa of V_r", s, "normal") for s in found.settings("mantissa of V_r")
    ]
    spread = 100 * (max(mantissas) / min(mantissas) - 1)
    return f"""
## P_r x V_r from 2047 down to 50

At depth 1, whose bound is 2047. First P_r = 448 and V_r falls; then V_r = 4.5 and P_r falls.

{found.table(by_v, first="P_r x V_r, by V_r")}

{found.table(by_p, first="P_r x V_r, by P_r")}

- A lower V_r costs next to nothing down to 252 (against 2016: {changes(by_v, "252")}): E4M3 is a
floating-point format and keeps its three bits until V meets the subnormals. Outliers get there
first: they set the scale of their channel and push the rest down. At 50: {changes(by_v, "50")}.
- P_r may fall further than V_r: every row has its own maximum, and its large probabilities carry
the sum. At 63: {changes(by_p, "63")}. The step to 50 ({changes(by_p, "50")}) is not the size:
P_r = {50 / 4.5:.2f} is no code, so that a probability of 1 itself is rounded.
- Where V_r falls between the steps of E4M3 matters as much. V_r from 4 to 7.5 at P_r = 224 on
normal data: {" / ".join(f"{m:.4f}" for m in mantissas)}, a spread of {spread:.1f} %. That is all
there is between (448, 448) in FP32 and (224, 4.5) in FP16.
"""


def _splits(found: Ablations) -> str:
    theirs = ("448, 2.25", "224, 4.5", "112, 9")
    first = ", ".join(found.one("split", s, "demo")["rel_l1"] for s in theirs)
    last = found.change("split", "2.25, 448", "224, 4.5", "demo")
    low, middle = (found.one("split", s, "outliers")["rel_l1"] for s in theirs[:2])
    return f"""
## Splits of 1008

P_r, V_r at depth 2; the first three are the paper's. The last two rows are FP32 sums; 288 has the
mantissa of 4.5.

{found.table("split", first="P_r, V_r")}

- The paper's three are equal here too ({first} on the demo): they differ by powers of two and round
alike except where a factor meets subnormals, and FP32 sums of the same codes (448, 288) err the
same.
- Below P_r = 28 the long tail of P goes into subnormals (peaked, demo): {last} at (2.25, 448) on
the demo. V_r = 2.25 is where outliers begin to show ({low} against {middle}). Of the paper's three
we keep the middle one.
"""


def _four_bits(found: Ablations) -> str:
    def l1(setting: str, data: str) -> str:
        return found.one("INT4", f"INT4, {setting}", data)["rel_l1"]

    both, turned = "Q and K smoothed", "Q and K smoothed, rotated"
    cosine = found.one("INT4", f"INT4, {both}", "demo")["cosine_worst_head"]
    return f"""
## INT4 with and without smoothing

`sage2pp_4` and its neighbours; the last row is `sage2pp_8`.

{found.table("INT4")}

- Smoothing Q: {l1("K smoothed", "Q + 3")} -> {l1(both, "Q + 3")} where Q has a mean,
{l1("K smoothed", "demo")} -> {l1(both, "demo")} on the demo, nothing on normal data. Smoothing K is
what keys with a common offset need: {l1("Q smoothed", "outliers")} -> {l1(both, "outliers")}.
- What is left on outliers are single large entries, which no mean removes. Rotation spreads them:
{l1(turned, "outliers")}; on the demo {l1(both, "demo")} -> {l1(turned, "demo")}. It is a field of a
recipe that no kernel computes yet.
- FP16 P and V change little: four bits of Q and K are nearly all of the error. Worst head on the
demo: cosine {cosine}, under the threshold of 0.998. INT4 runs only when asked for by name.
"""


def _row_sums(found: Ablations) -> str:
    of_p, of_codes = "sage2pp_8, sum of probabilities", "sage2pp_8, sum of codes"
    across = found.data("row sum")
    changes = ", ".join(f"{n} {found.change('row sum', of_codes, of_p, n)}" for n in across)
    int8 = ("sage1_vb, sum of probabilities", "sage1_vb, sum of codes")
    before, after = (found.one("row sum", s, "peaked") for s in int8)
    return f"""
## The row sum: of probabilities or of their codes

{found.table("row sum")}

- With E4M3 the sum of codes is never worse ({changes}): numerator and denominator lose the same
mass, so an output keeps its mean. A kernel that sums rows on the tensor core, as the Hopper one
does where it has the registers, gets it for nothing.
- With INT8 it is wrong. Codes are 0 below 1/254 of the maximum, and a smaller divisor blows up what
is left: {before["rel_l1"]} -> {after["rel_l1"]} on peaked rows, norm ratio
{after["norm_ratio_worst_head"]}. Only a V with a large mean gains.
"""


def _kernels(found: Ablations) -> str:
    made = rows("ablations_gpu.csv")
    ours = [r for r in made if r["kernel"] == "cuda_mma"]
    sums = [r for r in made if r["kernel"] == "cuda"]

    def off(r: Row) -> float:
        return abs(float(r["kernel_rel_l1"]) - float(r["emulated_rel_l1"]))

    lines = []
    for ablation in dict.fromkeys(r["ablation"] for r in ours):
        some = [r for r in ours if r["ablation"] == ablation]
        settings = len({r["setting"] for r in some})
        worst = max(some, key=lambda r: off(r) / float(r["emulated_rel_l1"]))
        lines.append(
            (
                *(ablation, str(settings), str(len(some)), f"{max(map(off, some)):.5f}"),
                f"{worst['setting']} on {worst['data']}: {worst['kernel_rel_l1']} against "
                f"{worst['emulated_rel_l1']}",
            )
        )
    table = markdown(("ablation", "settings", "rows", "most apart", "relatively most"), lines)
    of_codes = markdown(
        ("sum of codes, Hopper's kernels", "data", "kernel", "emulated"),
        (
            (
                r["setting"].split(",")[0],
                *(r["data"], r["kernel_rel_l1"], r["emulated_rel_l1"]),
            )
            for r in sums
        ),
    )
    small = [r for r in made if r["data"] != "demo"]
    here = max(
        abs(float(r["emulated_rel_l1"]) - found.l1(r["ablation"], r["setting"], r["data"]))
        for r in small
        if r["kernel"] == "cuda_mma"
    )
    one = made[0]
    sources = ", ".join(dict.fromkeys(r["sources"] for r in made))
    return f"""
## The same on kernels

One {one["gpu"]} (driver {one["driver"]}, {one["versions"]}; sources {sources};
[csv](../benchmarks/ablations_gpu.csv)): all settings above that the `cuda_mma` kernels compute, on
the same calls (of the demo the layers of the first step), in FP32 in and out. Hopper makes E4M3 and
INT4 products of others, right in value: this is arithmetic, not speed. Columns hold the relative L1
of kernels beside that of their emulator on the GPU, each against FP64.

{table}

Most apart are depths 1 and 2 at (112, 4.5), whose tiles have 128 keys in the emulator and 64 in the
kernel. The emulator on the GPU and the one on a CPU, of the tables above, differ by {here:.5f} at
most. So what the tables say of depths, ranges, splits and smoothing is what the kernels do.

The `cuda_mma` kernels sum probabilities. Hopper's own sum the codes, on the tensor core:

{of_codes}

They see FP16 in and out, tiles of their own, and FP8 sums that keep 13 bits on Hopper, which a V
with a large mean shows most.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
