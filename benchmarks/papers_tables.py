"""The accuracy tables of the SageAttention papers on data that anyone can make: the layers of the
bundled pipeline, normal numbers and stand-ins for outlier layers. Emulated, against FP64.

    python benchmarks/papers_tables.py

Writes benchmarks/papers_tables.csv, each row beside what the paper prints. Runs on a CPU in about a
minute; it measures accuracy, not speed. docs/ablations.md reads the table.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from ablations import Data, data_sets
from numerics_table import fp8_everywhere, naive_int8, spikes
from numerics_table import outliers as biased_k
from papers_four_bits import ON_BOTH, biased_q_and_k, four_bits
from papers_row import Printed, Row, by_recipe
from torch import Tensor

from sagepatch.env import Machine
from sagepatch.numerics import quantize
from sagepatch.numerics.metrics import Metrics, compare
from sagepatch.numerics.recipe import LARGEST_CODE, RECIPES
from sagepatch.spec import Call

COMMAND = "python benchmarks/papers_tables.py"
SAGE1, PLUS = "2410.02367", "2505.21136"
FA3 = "2407.08608"
FP8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def rounded(x: Tensor, name: str) -> Tensor:
    """x [..., S, D] rounded to INT8, E4M3 or E5M2 and back, one scale a token; FP16 without any."""
    rows = torch.arange(x.shape[-2])
    if name == "FP16":
        return quantize.round_to(x.float(), torch.float16)
    if name == "INT8":
        codes, scale = quantize.to_integer(x.float(), rows, 127)
    else:
        largest = torch.finfo(FP8[name]).max
        codes, scale = quantize.to_float8(x.float(), rows, largest, FP8[name])
    return codes * scale


def by_formats(call: Call, qk: str, pv: str, smooth: bool = True) -> Tensor:
    """Attention with Q and K in one format per token and P, V in another: P relative to its row's
    maximum, V per channel; sums in FP32.
    """
    k = call.k - call.k.mean(2, keepdim=True) if smooth else call.k
    scores = rounded(call.q, qk) @ rounded(k, qk).mT * call.scale
    p = torch.exp(scores - scores.amax(3, keepdim=True))
    largest = {"FP16": 1.0, "INT8": 127.0, "E4M3": 448.0, "E5M2": LARGEST_CODE["e5m2"]}[pv]
    if pv == "FP16":
        codes, v = quantize.round_to(p, torch.float16), rounded(call.v, "FP16")
    elif pv == "INT8":
        codes = torch.round(p * largest)
        v = torch.mul(*quantize.to_integer_per_channel(call.v.float(), 127))
    else:
        codes = quantize.round_to(p * largest, FP8[pv])
        v = torch.mul(*quantize.to_float8_per_channel(call.v.float(), largest, FP8[pv]))
    return codes @ v / largest / p.sum(3, keepdim=True)


def scores(call: Call, name: str) -> Tensor:
    """What softmax sees of Q K^T in a format per token: each row less its mean."""
    return seen(rounded(call.q, name) @ rounded(call.k, name).mT)


def seen(product: Tensor) -> Tensor:
    """Scores less each row's mean, which softmax does not see."""
    return product - product.mean(3, keepdim=True)


def formats() -> list[Row]:
    """Tables 2 and 3: formats of Q, K and of P, V over all layers, mean and worst."""
    average = {
        ("INT8", "E4M3"): Printed(0.9994, 0.0345, 3.53e-3),
        ("INT8", "INT8"): Printed(0.9970),
        ("E4M3", "E4M3"): Printed(0.9981),
        ("E5M2", "E4M3"): Printed(0.9937),
        ("INT8", "FP16"): Printed(),
        ("INT8", "E5M2"): Printed(),
    }
    worst = {
        ("INT8", "INT8"): Printed(0.5640, 0.792, 0.541),
        ("INT8", "E4M3"): Printed(0.7636),
        ("INT8", "FP16"): Printed(0.9999),
    }
    rows = []
    for over, table in (("mean", average), ("worst", worst)):
        number = "2, mean of layers" if over == "mean" else "3, worst layer"
        for (qk, pv), printed in table.items():
            setting = f"Q, K {qk}; P, V {pv}"
            run = partial(by_formats, qk=qk, pv=pv)
            rows.append(Row(SAGE1, f"Table {number}", setting, printed, run, "demo", over))
    naive = "Q, K exact; P normalised, INT8; V INT8"
    rows.append(Row(SAGE1, "Table 3, worst layer", naive, Printed(), naive_int8, "normal", "worst"))
    return rows


def accumulators() -> list[Row]:
    """Tables 4 and 5: FP16 against FP32 sums of P V."""
    mean, worst = Printed(0.9998, 0.0156, 2.94e-3), Printed(0.9984, 0.0511, 4.229e-3)
    rows = []
    for over, table, printed in (
        ("mean", "Table 4, mean of layers", mean),
        ("worst", "Table 5, worst layer", worst),
    ):
        for name, sums in (("sage1_b", "FP16"), ("sage1_b_f32", "FP32")):
            run = by_recipe(RECIPES[name])
            rows.append(Row(SAGE1, table, f"{sums} sums", printed, run, "demo", over))
    return rows


def kernels() -> list[Row]:
    """Table 9: the four kernels on normal data; and SageAttention2's two."""
    printed = {
        "sage1_t": Printed(1.000, 0.019, 6.8e-4),
        "sage1_b": Printed(1.000, 0.021, 7.3e-4),
        "sage1_vt": Printed(0.999, 0.064, 0.065),
        "sage1_vb": Printed(0.989, 0.138, 0.067),
    }
    return [
        Row(SAGE1, "Table 9, normal data", name, one, by_recipe(RECIPES[name]), "normal")
        for name, one in printed.items()
    ]


def products() -> list[Row]:
    """Table 17: the product Q K^T itself on an outlier layer."""
    printed = {
        "INT8": Printed(0.9954, 0.084),
        "E4M3": Printed(0.9283, 0.342),
        "E5M2": Printed(0.7795, 0.681),
    }
    return [
        Row(
            SAGE1,
            "Table 17, Q K^T of an outlier layer",
            f"Q, K {name}, as they are",
            one,
            partial(scores, name=name),
            "K + 16 n: Q K^T",
        )
        for name, one in printed.items()
    ]


def smoothing() -> list[Row]:
    """Table 18: smoothing K on an outlier layer."""
    printed = {
        ("token", False): Printed(0.6224, 1.187),
        ("token", True): Printed(0.9947, 0.045),
        ("block", False): Printed(0.3060, 1.286),
        ("block", True): Printed(0.9931, 0.072),
    }
    rows = []
    for (granularity, smooth), one in printed.items():
        recipe = replace(
            RECIPES["sage1_t"],
            q_granularity=granularity,
            k_granularity=granularity,
            smooth_k=smooth,
        )
        setting = f"INT8 per {granularity}, {'smoothed' if smooth else 'as it is'}"
        table = "Table 18, an outlier layer"
        rows.append(Row(SAGE1, table, setting, one, by_recipe(recipe), "K + 64 n"))
    everywhere = partial(fp8_everywhere, block=None, rotated=False)
    setting = "FlashAttention-3's FP8, as it is"
    rows.append(
        Row(
            SAGE1,
            "Table 18, an outlier layer",
            setting,
            Printed(0.2676, 2.535),
            everywhere,
            "K + 64 n",
        )
    )
    return rows


def ranges() -> list[Row]:
    """Table 2 of SageAttention2++: ranges of P and V."""
    rows = []
    for p_range, v_range, l1 in (
        (448.0, 448.0, 0.01862),
        (448.0, 2.25, 0.01863),
        (224.0, 4.5, 0.01862),
        (112.0, 9.0, 0.01863),
    ):
        base = RECIPES["sage2_8" if v_range == 448 else "sage2pp_8"]
        recipe = replace(base, p_range=p_range, v_range=v_range)
        setting = f"P_r {p_range:g}, V_r {v_range:g}, {recipe.accumulate.upper()} sums"
        table = "Table 2, mean of layers"
        rows.append(Row(PLUS, table, setting, Printed(0.9997, l1), by_recipe(recipe), "demo"))
    return rows


def rotations() -> list[Row]:
    """FlashAttention-3's outliers: one entry in a thousand of ten sigma."""
    table = "0.1 % outliers of 10 sigma"
    plain, turned = Printed(rmse=2.4e-2), Printed(rmse=9.1e-3)
    per_tensor = partial(fp8_everywhere, block=None, rotated=False)
    per_block = partial(fp8_everywhere, block=128, rotated=True)
    return [
        Row(FA3, table, "E4M3 per tensor", plain, per_tensor, "spikes"),
        Row(FA3, table, "E4M3 per block, rotated", turned, per_block, "spikes"),
        Row(FA3, table, "sage2pp_8", Printed(), by_recipe(RECIPES["sage2pp_8"]), "spikes"),
        Row(FA3, table, "sage1_b", Printed(), by_recipe(RECIPES["sage1_b"]), "spikes"),
    ]


def data() -> dict[str, Data]:
    """What the rows are measured on."""
    sets = data_sets()
    kept = {name: sets[name] for name in ("normal", "demo")}
    kept["K + 64 n"] = Data.of("K + 64 n", iter([biased_k(64)]))
    kept[ON_BOTH] = Data.of(ON_BOTH, iter([biased_q_and_k()]))
    kept["spikes"] = Data.of("spikes", iter([spikes()]))
    call = biased_k(16)
    product = seen(call.q.double() @ call.k.double().mT)
    kept["K + 16 n: Q K^T"] = Data("K + 16 n: Q K^T", (call,), (product,))
    return kept


def measured(row: Row, data: Data) -> tuple[float, float, float]:
    """Cosine, relative L1 and RMSE of a row: means over calls, or each at its worst head."""
    found = [
        compare(row.run(call), reference)
        for call, reference in zip(data.calls, data.references, strict=True)
    ]
    if row.over == "worst":
        heads: Sequence[Metrics] = [one.worst for one in found]
        return (
            min(m.cosine for m in heads),
            max(m.rel_l1 for m in heads),
            max(m.rmse for m in heads),
        )
    whole = [one.whole for one in found]
    return (
        statistics.mean(m.cosine for m in whole),
        statistics.mean(m.rel_l1 for m in whole),
        statistics.mean(m.rmse for m in whole),
    )


def lines() -> list[Row]:
    """Every row of every paper, in the order of the table."""
    return [
        *(*formats(), *accumulators(), *kernels(), *products()),
        *(*smoothing(), *four_bits(), *ranges(), *rotations()),
    ]


def main() -> None:
    """Measure every row."""
    sets = data()
    found = []
    for row in lines():
        cosine, rel_l1, rmse = measured(row, sets[row.data])
        theirs = row.printed
        found.append(
            {
                "paper": f"arXiv {row.paper}",
                "table": row.table,
                "setting": row.setting,
                "theirs_cosine": _text(theirs.cosine, "g"),
                "theirs_rel_l1": _text(theirs.rel_l1, "g"),
                "theirs_rmse": _text(theirs.rmse, "g"),
                "cosine": f"{cosine:.5f}",
                "rel_l1": f"{rel_l1:.5f}",
                "rmse": f"{rmse:.3e}",
                "data": row.data,
                "over": row.over,
                "device": "CPU",
                "versions": f"torch {Machine.here().versions['torch']}",
                "command": COMMAND,
            }
        )
        print(row.table, "|", row.setting, "|", *list(found[-1].values())[3:9], flush=True)
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, found[0].keys())
        writer.writeheader()
        writer.writerows(found)


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


if __name__ == "__main__":
    main()
