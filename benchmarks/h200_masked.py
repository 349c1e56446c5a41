"""HunyuanVideo's true mask against no mask, in one run: 118,800 video tokens and 256 of text, of
which a prompt fills some; 24 heads of 128, bf16, whole calls.

    python benchmarks/h200_masked.py --out benchmarks/h200_masked.csv [--rounds 5]

A rate counts the work of valid keys only, 4 heads q_len valid_keys head_dim over the time, so that
`of_unmasked` is what skipping leaves of the unmasked rate. Runs of one round are in random order; a
kernel is timed after both of its results agreed with exact attention; where one did not, the script
ends with 1.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sagepatch
from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.env import Machine
from sagepatch.numerics.attention import exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call

FIELDS = (
    *("shape", "variant", "b", "hq", "hkv", "sq", "skv", "valid_keys", "d", "mask", "dtype"),
    *("ms_median", "ms_p20", "ms_p80", "tflops_valid", "of_unmasked", "cos", "rel_l1"),
    *("gpu", "driver", "cuda", "torch", "triton", "sagepatch", "commit", "command"),
)
VARIANTS = ("cuda.sage2pp_8_d4", "cuda.sage2_8", "cuda.sage1_b_f32", "triton.sage2_8b_k128")
ROWS_CHECKED = 256
LEAST_COSINE = 0.998


@dataclass(frozen=True, slots=True)
class Shape:
    """Joint attention over video and text; `prompt` of the text tokens are no padding."""

    name: str
    video: int
    text: int = 256
    prompt: int = 60
    heads: int = 24
    dim: int = 128
    repeats: int = 1  # a round

    @property
    def tokens(self) -> int:
        return self.video + self.text

    def flops(self, keys: int) -> float:
        return 4.0 * self.heads * self.tokens * keys * self.dim


SHAPES = (Shape("hunyuan_33k", 32512, repeats=8), Shape("hunyuan_720p", 118_800))


def calls(shape: Shape) -> dict[str, Call]:
    """The call without a mask and with one, bool [1, 1, 1, tokens]."""
    gen = torch.Generator("cuda").manual_seed(0)
    size = (1, shape.heads, shape.tokens, shape.dim)
    q, k, v = (
        torch.randn(size, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    plain = Call(q, k, v, shape.dim**-0.5)
    valid = torch.arange(shape.tokens, device="cuda") < shape.video + shape.prompt
    return {"none": plain, "key_padding": replace(plain, attn_mask=valid.view(1, 1, 1, -1))}


def sdpa(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(call.q, call.k, call.v, attn_mask=call.attn_mask)


def error(call: Call, out: Tensor) -> tuple[float, float]:
    """Cosine and relative L1 of two heads against FP32, on the last rows."""
    part = replace(
        call,
        q=call.q[:, :2, -ROWS_CHECKED:],
        k=call.k[:, :2],
        v=call.v[:, :2],
    )
    worst = compare(out[:, :2, -ROWS_CHECKED:].float(), exact(part)[0].float()).worst
    return worst.cosine, worst.rel_l1


def once_ms(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def measure(shape: Shape, rounds: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of one shape: every kernel, without and with the mask; and how many were wrong."""
    made = calls(shape)
    # Without a mask: with one, torch adds it as a bias and never skips a tile.
    runs: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("sdpa", "none"): lambda: sdpa(made["none"])
    }
    for name in VARIANTS:
        variant = BY_NAME[name]
        if unusable(variant):
            print(f"{name}: left out, {unusable(variant)}", flush=True)
            continue
        kernel = load(variant.entry)
        for mask, call in made.items():
            runs[name, mask] = lambda k=kernel, c=call, r=variant.recipe: k(c, r)[0]
    found = {key: error(made[key[1]], run()) for key, run in runs.items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(rounds):
        order = list(runs)
        random.Random(turn).shuffle(order)
        for key in order:
            if found[key][0] < LEAST_COSINE:
                continue
            times[key] += [once_ms(runs[key]) for _ in range(shape.repeats)]
    rows = []
    rates: dict[tuple[str, str], float] = {}
    for (name, mask), taken in times.items():
        if not taken:
            print(f"{shape.name} {name} {mask}: wrong, {found[name, mask]}; not timed", flush=True)
            continue
        keys = shape.tokens if mask == "none" else shape.video + shape.prompt
        p20, median, p80 = torch.tensor(taken).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
        rates[name, mask] = shape.flops(keys) / median / 1e9
        rows.append(
            {
                "shape": shape.name,
                "variant": name,
                **{"b": 1, "hq": shape.heads, "hkv": shape.heads, "d": shape.dim},
                **{"sq": shape.tokens, "skv": shape.tokens, "valid_keys": keys},
                **{"mask": mask, "dtype": "bf16"},
                "ms_median": f"{median:.3f}",
                "ms_p20": f"{p20:.3f}",
                "ms_p80": f"{p80:.3f}",
                "tflops_valid": f"{rates[name, mask]:.1f}",
                "of_unmasked": f"{rates[name, mask] / rates[name, 'none']:.4f}",
                "cos": f"{found[name, mask][0]:.6f}",
                "rel_l1": f"{found[name, mask][1]:.5f}",
            }
        )
        print(
            f"{shape.name} {name:21s} {mask:11s} {median:8.2f} ms "
            f"{rates[name, mask]:6.1f} TFLOPS, {rows[-1]['of_unmasked']} of unmasked",
            flush=True,
        )
    return rows, len(runs) - len(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/h200_masked.csv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    machine = Machine.here()
    facts = {
        "gpu": machine.gpu_name,
        "driver": machine.driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": machine.versions.get("triton"),
        "sagepatch": sagepatch.__version__,
        "commit": args.commit,
        "command": "python " + " ".join(sys.argv),
    }
    with open(args.out, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        wrong = 0
        for shape in SHAPES:
            rows, untimed = measure(shape, args.rounds)
            writer.writerows({**row, **facts} for row in rows)
            wrong += untimed
            file.flush()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
