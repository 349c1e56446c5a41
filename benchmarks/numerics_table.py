"""The papers' accuracy experiments repeated with our emulator on data that anyone can make, and the
questions that the papers leave open.

    python benchmarks/numerics_table.py

Writes benchmarks/numerics_table.csv, every row against FP64. Runs on a CPU in a few minutes; it
measures accuracy, not speed. docs/numerics.md reads the table.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine
from sagepatch.numerics import quantize, smooth
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.spec import Call

COMMAND = "python benchmarks/numerics_table.py"
SHAPE = (1, 4, 1024, 128)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEMO_RECIPES = (
    *(RECIPES[name] for name in ("sage2pp_8", "sage2_8", "sage1_vb", "sage1_b", "sage2_4")),
    replace(RECIPES["sage1_vb"], name="sage1_vb smooth_v", smooth_v=True),
    replace(RECIPES["sage2_8"], name="sage2_8 smooth_v", smooth_v=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: what `run` makes of `call`, against FP64."""

    experiment: str
    setting: str
    data: str
    call: Call
    run: Callable[[Call], Tensor]


def by(recipe: Recipe) -> Callable[[Call], Tensor]:
    return lambda call: emulate(call, recipe)[0]


def normal(shape: tuple[int, int, int, int] = SHAPE, seed: int = 0) -> Call:
    """Standard normal q, k and v."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, *shape, generator=g).unbind(0)
    return Call(q, k.clone(), v.clone(), shape[3] ** -0.5)


def outliers(offset: float) -> Call:
    """All keys of a head share `offset` times a normal vector: the outlier layers of the papers are
    of this kind, a bias and no variance.
    """
    call = normal()
    shared = torch.randn(1, SHAPE[1], 1, SHAPE[3], generator=torch.Generator().manual_seed(1))
    return replace(call, k=call.k + offset * shared)


def spikes() -> Call:
    """One entry in a thousand deviates ten times as much: the data of FlashAttention-3."""
    g = torch.Generator().manual_seed(2)
    call = normal()

    def spiked(x: Tensor) -> Tensor:
        return x + 10 * torch.randn(SHAPE, generator=g) * (torch.rand(SHAPE, generator=g) < 1e-3)

    return replace(call, q=spiked(call.q), k=spiked(call.k), v=spiked(call.v))


def fp8_everywhere(call: Call, block: int | None, rotated: bool) -> Tensor:
    """E4M3 for all four operands as in FlashAttention-3: one scale a tensor, or one a block of
    rows; P times 256.
    """

    def rounded(x: Tensor) -> Tensor:
        groups = quantize.query_groups(
            x.shape[2], "tensor" if block is None else "block", block or 1, x.device
        )
        return math.prod(quantize.to_float8(x, groups, 448.0, E4M3))  # type: ignore[return-value]

    q, k = (smooth.rotate(call.q), smooth.rotate(call.k)) if rotated else (call.q, call.k)
    scores = rounded(q) @ rounded(k).mT * call.scale
    p = torch.exp(scores - scores.amax(3, keepdim=True))
    return quantize.round_to(p * 256, E4M3) @ rounded(call.v) / 256 / p.sum(3, keepdim=True)


def naive_int8(call: Call) -> Tensor:
    """Normalised probabilities times 127, rounded: INT8 P without a running maximum."""
    p = torch.softmax(call.q @ call.k.mT * call.scale, 3)
    v = quantize.to_integer_per_channel(call.v, 127)
    return torch.round(p * 127) / 127 @ (v.codes * v.scale)


def codes_of_qk(call: Call, name: str) -> Call:
    """`call` with q and k rounded to a format per token; no smoothing."""

    def rounded(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[2])
        if name == "INT8":
            codes, scale = quantize.to_integer(x, rows, 127)
        else:
            dtype = {"E4M3": E4M3, "E5M2": E5M2}[name]
            codes, scale = quantize.to_float8(x, rows, torch.finfo(dtype).max, dtype)
        return codes * scale

    return replace(call, q=rounded(call.q), k=rounded(call.k))


def published() -> Iterator[Row]:
    """What the papers print."""
    shape = "x".join(map(str, SHAPE)) + " normal"
    plain = normal()
    for name in RECIPES:
        if name != "exact":
            yield Row("normal data", name, shape, plain, by(RECIPES[name]))
    yield Row("P and V", "INT8, P normalised", shape, plain, naive_int8)
    base, plus = RECIPES["sage2_8"], RECIPES["sage2pp_8"]
    yield Row("P_r, V_r", "448, 448, FP32", shape, plain, by(base))
    for p, v in ((448.0, 2.25), (224.0, 4.5), (112.0, 9.0)):
        recipe = replace(plus, p_range=p, v_range=v)
        yield Row("P_r, V_r", f"{p:g}, {v:g}, FP16", shape, plain, by(recipe))
    one = replace(plain, k=plain.k.clone())
    one.k[..., 5] += 8
    for granularity in ("token", "block"):
        for smoothed in (True, False):
            recipe = replace(
                RECIPES["sage1_t_f32"],
                k_granularity=granularity,
                q_granularity=granularity,
                smooth_k=smoothed,
            )
            setting = f"per {granularity}, {'smoothed' if smoothed else 'as it is'}"
            yield Row("one K channel + 8", setting, shape, one, by(recipe))
            for offset in (16, 64, 256):
                yield Row(
                    f"K + {offset} x a normal vector", setting, shape, outliers(offset), by(recipe)
                )
    for offset in (16, 64, 256):
        experiment = f"K + {offset} x a normal vector"
        call = outliers(offset)
        for name in ("INT8", "E4M3", "E5M2"):
            setting = f"Q and K in {name} per token, as it is, P and V exact"
            yield Row(
                experiment, setting, shape, call, lambda c, n=name: exact(codes_of_qk(c, n))[0]
            )
        yield Row(
            experiment, "all E4M3 per tensor", shape, call, lambda c: fp8_everywhere(c, None, False)
        )
    spiked, data = spikes(), shape + " + 0.1 % of 10 sigma"
    for block in (None, 128):
        for rotated in (False, True):
            setting = f"E4M3 per {'tensor' if block is None else 'block'}"
            setting += ", rotated" if rotated else ""
            yield Row(
                "0.1 % outliers",
                setting,
                data,
                spiked,
                lambda c, b=block, r=rotated: fp8_everywhere(c, b, r),
            )
    for name in ("sage2_8", "sage1_b", "sage2_4"):
        for rotated in (False, True):
            recipe = replace(RECIPES[name], rotate=rotated)
            setting = name + (", rotated" if rotated else "")
            yield Row("0.1 % outliers", setting, data, spiked, by(recipe))


def open_questions() -> Iterator[Row]:
    """What the papers leave open: depth, ranges, granularity, knobs, length."""
    shape = "x".join(map(str, SHAPE)) + " normal"
    plain = normal()
    many, many_data = normal((1, 2, 8192, 128)), "1x2x64x8192x128 normal, Q x 2"
    many = replace(many, q=2 * many.q[:, :, :64])
    shifted = replace(plain, v=plain.v + 3)
    for name, experiment in (
        ("sage2_8", "FP32"),
        *((f"sage2pp_8{d}", "FP16") for d in ("_d1", "", "_d4", "_d6")),
    ):
        for call, data in ((plain, shape), (shifted, shape + ", V + 3")):
            yield Row(
                "depth of the FP16 buffer", f"{name}, {experiment}", data, call, by(RECIPES[name])
            )
    for v in (4.5, 2.25, 1.125, 0.5625, 0.28125, 0.140625, 0.0703125):
        recipe = replace(RECIPES["sage2pp_8"], v_range=v)
        yield Row("how low V_r", f"P_r 224, V_r {v:g}", shape, plain, by(recipe))
    for p in (224.0, 56.0, 14.0, 3.5, 1.0):
        recipe = replace(RECIPES["sage2pp_8"], p_range=p)
        for call, data in ((plain, shape), (many, many_data)):
            yield Row("how low P_r", f"P_r {p:g}, V_r 4.5", data, call, by(recipe))
    for side in ("q_granularity", "k_granularity"):
        for granularity in ("token", "thread", "block", "tensor"):
            recipe = replace(RECIPES["sage1_t_f32"], **{side: granularity})
            setting = f"{side[0].upper()} per {granularity}, the other per token"
            yield Row("granularity", setting, shape, plain, by(recipe))
    knob_data = (
        (plain, shape),
        (shifted, shape + ", V + 3"),
        (many, many_data),
        (replace(many, v=many.v + 3), many_data + ", V + 3"),
    )
    for knob in ({}, {"smooth_v": True}, {"rotate": True}, {"sum_quantised_p": True}):
        for name in ("sage2_8", "sage1_vb"):
            for call, data in knob_data:
                setting = f"{name} {next(iter(knob), 'as it is')}"
                yield Row("knobs", setting, data, call, by(replace(RECIPES[name], **knob)))
    for smoothed in (True, False):
        recipe = replace(RECIPES["sage2_4"], smooth_q=smoothed)
        setting = "Q and K smoothed" if smoothed else "K smoothed"
        q = plain.q + 3 * torch.randn(SHAPE[3], generator=torch.Generator().manual_seed(3))
        yield Row("INT4 Q and K", setting, shape, plain, by(recipe))
        data = shape + ", Q + 3 x a normal vector"
        yield Row("INT4 Q and K", setting, data, replace(plain, q=q), by(recipe))
    for length in (1024, 8192, 32_768, 131_072, 200_000):
        long = normal((1, 2, length, 128))
        long = replace(long, q=long.q[:, :, :64])
        for name in ("sage2pp_8", "sage2_8", "sage1_vb", "sage1_b", "sage2_4"):
            data = f"1x2x64x{length}x128 normal"
            yield Row("length", f"{name}, {length} keys", data, long, by(RECIPES[name]))


class Recorded(TorchFunctionMode):
    """Keeps the attention calls of what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(
        self, func: object, types: object, args: tuple[Tensor, ...] = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            q, k, v = names["query"], names["key"], names["value"]
            if q.shape[2] > 64:  # the denoiser's; the text encoders see 32 tokens
                assert names.get("attn_mask") is None
                self.calls.append(Call(q, k, v, names.get("scale") or q.shape[3] ** -0.5))
        return func(*args, **kwargs)  # type: ignore[operator]


def trained_layers() -> Iterator[Row]:
    """The attention of the bundled pipeline, a small trained Flux, layer by layer, step by step."""
    pipe = load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    arguments = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__dataclass_fields__}
    with torch.no_grad(), Recorded() as recorded:
        pipe("a red apple", generator=torch.Generator("cpu").manual_seed(0), **arguments)
    steps = DEFAULTS.num_inference_steps
    layers = len(recorded.calls) // steps
    for index, call in enumerate(recorded.calls):
        B, H, S, D = call.q.shape
        for recipe in DEMO_RECIPES:
            setting = (
                f"{recipe.name}, layer {index % layers}, step {index // layers + 1} of {steps}"
            )
            yield Row("the demo's layers", setting, f"{B}x{H}x{S}x{D}", call, by(recipe))


def main() -> None:
    """Measure every row against FP64."""
    versions = f"torch {Machine.here().versions['torch']}"
    rows = []
    reference: tuple[Call | None, Tensor] = (None, torch.empty(0))
    for row in (*published(), *open_questions(), *trained_layers()):
        if reference[0] is not row.call:
            reference = (row.call, exact(row.call, torch.float64)[0])
        found = compare(row.run(row.call), reference[1])
        rows.append(
            {
                "experiment": row.experiment,
                "setting": row.setting,
                "cosine": f"{found.whole.cosine:.6f}",
                "cosine_worst_head": f"{found.worst.cosine:.6f}",
                "rel_l1": f"{found.whole.rel_l1:.5f}",
                "rmse": f"{found.whole.rmse:.3e}",
                "sqnr_db": f"{found.whole.sqnr_db:.1f}",
                "norm_ratio": f"{found.whole.norm_ratio:.5f}",
                "data": row.data,
                "device": "CPU",
                "versions": versions,
                "command": COMMAND,
            }
        )
        shown = rows[-1]
        print(
            f"{row.experiment:28s} {row.setting:58s} {shown['cosine']} {shown['rel_l1']}",
            flush=True,
        )
    with Path(__file__).with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
