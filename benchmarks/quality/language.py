"""A language model trained on the spot, and what each way to run its attention does to it.

    python -m benchmarks.quality.language [--train-seconds 140] [--measure-seconds 70]

On one H200 about five minutes: trains a Llama of 38 M parameters from random weights on Python
sources under open licences (`corpus`), with retrieval and copying tasks woven in, up to 32k tokens
a row; then perplexity at 1k to 32k on folders that were held out, by position, retrieval and
copying, for exact attention, every recipe's kernel, the calibrated plan and the baselines, all
through `sagepatch.apply`. Writes language_*.csv beside this file, or under --out. `--tiny` proves
on a CPU that the script runs; its numbers mean nothing. `--keep FOLDER` leaves the model there, and
`--model FOLDER` measures one that is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sagepatch
from benchmarks.quality import ahead, layers, tables
from benchmarks.quality.conditions import (
    EXACT,
    FAILURES,
    Condition,
    baselines,
    recipes,
    under,
)
from benchmarks.quality.language_measure import (
    MOST_ROWS,
    PASS_TOKENS,
    Record,
    perplexity,
    recall,
    summarised,
)
from benchmarks.quality.language_model import FULL, TINY, Size, Trainer, train
from sagepatch.plan import Plan

LENGTHS = (1024, 8192, 32768)
RECALL_LENGTHS = (4096, 32768)
TINY_LENGTHS = (512, 1024)
# Documents of one round; every condition sees a round before the next begins.
ROUND = 1
LAYER_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of everything: the model and the lengths measured."""

    size: Size
    lengths: tuple[int, ...]
    recall_lengths: tuple[int, ...]
    layer_tokens: int


FULL_SCALE = Scale(FULL, LENGTHS, RECALL_LENGTHS, LAYER_TOKENS)
TINY_SCALE = Scale(TINY, TINY_LENGTHS, TINY_LENGTHS[-1:], 512)

started = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s]", *words, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--train-seconds", type=float, default=140)
    parser.add_argument("--measure-seconds", type=float, default=70)
    parser.add_argument("--until", type=float, help="begin no round that would end after so long")
    parser.add_argument("--most-megabytes", type=float, default=120)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit")
    return parser.parse_args()


def main() -> None:
    """Train, calibrate, measure, write."""
    options = parsed()
    scale = TINY_SCALE if options.tiny else FULL_SCALE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = tables.provenance(tables.command_of("language", sys.argv[1:]), options.commit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or options.keep or Path(scratch) / "model"
        trainer = None
        if options.model is None:
            # The backward of cuDNN's attention has given NaN (torch 2.11, H200).
            torch.backends.cuda.enable_cudnn_sdp(False)
            trainer = Trainer(scale.size, device, not options.no_compile and device.type == "cuda")
            corpus = start_corpus(options, folder, about)
            trainer.warm()
            say("compiled")
        helpers = [] if device.type == "cpu" else ahead.start(geometries(scale))
        if trainer is not None:
            trained(options, trainer, corpus, folder, about)
            del trainer
            torch.backends.cuda.enable_cudnn_sdp(True)
        model, held, text = loaded(folder, device)
        say("compiled ahead:", [helper.poll() for helper in helpers])
        try:
            plan = calibrated(model, text, scale, device)
            plan.save(options.out / "language_plan.json")
            chosen = [Condition("calibrated plan", "plan", plan)]
        except FAILURES:
            traceback.print_exc()
            chosen = []
        conditions = [EXACT, *chosen, *recipes(device), *baselines()]
        write_layers(model, text, scale, device, conditions, options.out, about)
        measure(model, held, scale, device, conditions, options, about)


def geometries(scale: Scale) -> list[ahead.Geometry]:
    """The calls that the measuring makes, and those of the demo pipeline, which may run beside."""
    size, longest = scale.size, max(scale.lengths)
    rows = {(max(1, min(PASS_TOKENS, longest) // length), length) for length in scale.lengths}
    rows |= {(min(MOST_ROWS, longest // length), length) for length in scale.recall_lengths}
    rows.add((1, scale.layer_tokens))
    causal = [
        ahead.Geometry(many, size.heads, size.kv_heads, length, size.head_dim, 1)
        for many, length in sorted(rows)
    ]
    demo = [ahead.Geometry(count, 3, 3, 1056, 64, 0) for count in (120, 4)]
    return [*demo, *causal]


def start_corpus(
    options: argparse.Namespace, folder: Path, about: dict[str, str]
) -> subprocess.Popen[bytes]:
    """The corpus is made while the model compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.quality.corpus", "--out", str(folder)),
            *("--most-megabytes", str(options.most_megabytes), "--commit", about["commit"]),
        ]
    )


def trained(
    options: argparse.Namespace,
    trainer: Trainer,
    corpus: subprocess.Popen[bytes],
    folder: Path,
    about: dict[str, str],
) -> None:
    """Train, and leave the model beside its corpus."""
    device = trainer.device
    parameters = sum(weight.numel() for weight in trainer.weights)
    say(f"{parameters / 1e6:.1f} M parameters; waiting for the corpus")
    if corpus.wait():
        raise RuntimeError("the corpus could not be made")
    tokens = torch.from_numpy(np.load(folder / "tokens.npz")["train"].astype(np.int32)).to(device)
    say(f"training on {len(tokens) / 1e6:.1f} M tokens")
    rows = []
    for row in train(trainer, tokens, options.train_seconds):
        rows.append({**row, "parameters": parameters})
        say(row)
    tables.write(options.out / "language_training.csv", rows, about)
    sources = tables.read(folder / "sources.csv")
    tables.write(options.out / "language_sources.csv", sources, {})
    trainer.model.save_pretrained(folder)


def loaded(
    folder: Path, device: torch.device
) -> tuple[Any, NDArray[np.uint16], NDArray[np.uint16]]:
    """The model as a user loads it, the tokens that were held out and those it was trained on."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokens = np.load(folder / "tokens.npz")
    return model.to(device).eval(), tokens["held"], tokens["train"]


def documents_of(tokens: NDArray[np.uint16], length: int, device: torch.device) -> Tensor:
    """Consecutive windows of `length` tokens, in an order drawn once, [n, length]."""
    whole = tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int64)
    return torch.from_numpy(np.random.default_rng(0).permutation(whole)).to(device)


def calibrated(model: Any, text: NDArray[np.uint16], scale: Scale, device: torch.device) -> Plan:
    """The plan of a calibration on four rows of the training text, at the longest length."""
    ids = documents_of(text[: 5 * scale.lengths[-1]], scale.lengths[-1], device)[:4]

    def run() -> None:
        with torch.inference_mode():
            for row in ids:
                model.model(input_ids=row[None], use_cache=False)

    plan = sagepatch.calibrate(model, run=run, emulate=device.type == "cpu").plan()
    say("plan:", Condition("plan", "plan", plan).kernel(device))
    return plan


def write_layers(
    model: Any,
    text: NDArray[np.uint16],
    scale: Scale,
    device: torch.device,
    conditions: Sequence[Condition],
    out: Path,
    about: dict[str, str],
) -> None:
    """Every kernel on the calls of one row of training text."""
    ids = torch.from_numpy(text[: scale.layer_tokens].astype(np.int64)).to(device)[None]
    single = [condition for condition in conditions if condition.plan is None]
    with torch.inference_mode():
        calls = layers.captured(model, lambda: model.model(input_ids=ids, use_cache=False), (1,))
        tables.write(out / "language_layers.csv", layers.rows(calls, single), about)
    say("layers written")


def measure(
    model: Any,
    held: NDArray[np.uint16],
    scale: Scale,
    device: torch.device,
    conditions: Sequence[Condition],
    options: argparse.Namespace,
    about: dict[str, str],
) -> None:
    """Rounds of documents until the time is up; what every condition has seen is written."""
    documents = documents_of(held, max(scale.lengths), device)
    say(f"{len(documents)} held-out documents of {max(scale.lengths)} tokens")
    records: list[Record] = []
    failed: set[str] = set()
    began = time.perf_counter()
    ends = started + options.until if options.until else began + options.measure_seconds
    last_round = 0.0
    for first in range(0, len(documents), ROUND):
        round_began = time.perf_counter()
        if first and round_began + last_round > ends:
            break
        batch = documents[first : first + ROUND]
        for condition in conditions:
            if condition.name in failed:
                continue
            try:
                with under(condition, model, device):
                    fresh = perplexity(condition.name, model, batch, first, scale.lengths)
                    fresh += recall(condition.name, model, batch, first, scale.recall_lengths)
            except FAILURES:
                traceback.print_exc()
                failed.add(condition.name)
                print(f"{condition.name} failed and is left out", flush=True)
            else:
                records += fresh
        records = [record for record in records if record.condition not in failed]
        last_round = time.perf_counter() - round_began
        say(f"{first + len(batch)} documents measured")
        # What a run that is cut off leaves.
        raw = [asdict(record) for record in records]
        tables.write(options.out / "language_records.csv", raw, {})
    say("failed:", sorted(failed) or "nothing")
    write_summary(records, conditions, device, options.out, about)


def write_summary(
    records: Sequence[Record],
    conditions: Sequence[Condition],
    device: torch.device,
    out: Path,
    about: dict[str, str],
) -> None:
    """language_perplexity.csv, language_positions.csv and language_recall.csv."""
    named = {condition.name: condition for condition in conditions}
    rows = [
        {
            "group": named[str(row["condition"])].group,
            "kernel": named[str(row["condition"])].kernel(device),
            **row,
        }
        for row in summarised(records, EXACT.name)
    ]
    for name, measures in (
        ("perplexity", ("perplexity",)),
        ("positions", ("position",)),
        ("recall", ("retrieval", "copy")),
    ):
        kept = [row for row in rows if row["measure"] in measures]
        tables.write(out / f"language_{name}.csv", kept, about)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
