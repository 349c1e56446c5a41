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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sagepatch
from benchmarks.quality import layers, tables
from benchmarks.quality.conditions import (
    EXACT,
    FAILURES,
    Condition,
    baselines,
    recipes,
    under,
)
from benchmarks.quality.language_measure import Record, perplexity, recall, summarised
from benchmarks.quality.language_model import FULL, TINY, Size, Trainer, new_model, train
from sagepatch.plan import Plan

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
RECALL_LENGTHS = (1024, 4096, 8192, 16384, 32768)
TINY_LENGTHS = (512, 1024)
# Documents of one round; every condition sees a round before the next begins.
ROUND = 4
AHEAD = 10
LAYER_TOKENS = 4096


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
    parser.add_argument("--most-megabytes", type=float, default=120)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--ahead", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Train, calibrate, measure, write."""
    options = parsed()
    scale = TINY_SCALE if options.tiny else FULL_SCALE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.ahead is not None:
        compile_ahead(scale, device, options.ahead)
        return
    kept = [word for word in sys.argv[1:] if not word.startswith("--commit")]
    command = " ".join(["python -m benchmarks.quality.language", *kept])
    about = tables.provenance(command, options.commit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or options.keep or Path(scratch) / "model"
        helpers = [] if device.type == "cpu" else ahead(options.tiny)
        if options.model is None:
            trained(options, scale.size, device, folder, about)
        model, held, text = loaded(folder, device)
        say("compiled ahead:", [helper.wait() for helper in helpers])
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


def ahead(tiny: bool) -> list[subprocess.Popen[bytes]]:
    """Processes that compile every kernel while the model trains; Triton keeps them on disk."""
    command = [sys.executable, "-m", "benchmarks.quality.language", *(["--tiny"] * tiny), "--ahead"]
    return [subprocess.Popen([*command, str(number)]) for number in range(AHEAD)]


def compile_ahead(scale: Scale, device: torch.device, number: int) -> None:
    """Run a share of the conditions once on every shape, on one layer of random weights."""
    torch.cuda.set_per_process_memory_fraction(0.08)
    model = new_model(replace(scale.size, layers=1), device, torch.bfloat16).eval()
    longest = max(scale.lengths)
    document = torch.randint(7, 4096, (1, longest), device=device)
    everything = [*recipes(device), *baselines()]
    # The plan's candidates are timed in a process of their own; its kernels are these recipes'.
    for condition in everything[number::AHEAD]:
        try:
            with under(condition, model, device):
                perplexity(condition.name, model, document, 0, scale.lengths)
                recall(condition.name, model, document, 0, scale.recall_lengths)
                with torch.inference_mode():
                    model(document[:, : scale.layer_tokens])
        except FAILURES as error:
            print(f"ahead: {condition.name}: {error}", flush=True)


def trained(
    options: argparse.Namespace,
    size: Size,
    device: torch.device,
    folder: Path,
    about: dict[str, str],
) -> None:
    """Make the corpus and a model, and leave both in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.quality.corpus", "--out", str(folder)),
            *("--most-megabytes", str(options.most_megabytes), "--commit", about["commit"]),
        ]
    )
    # The backward of cuDNN's attention has given NaN (torch 2.11, H200).
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer = Trainer(size, device, compiled=not options.no_compile and device.type == "cuda")
    parameters = sum(weight.numel() for weight in trainer.weights)
    say(f"{parameters / 1e6:.1f} M parameters; compiling")
    trainer.warm()
    say("compiled; waiting for the corpus")
    if corpus.wait():
        raise RuntimeError("the corpus could not be made")
    tokens = np.load(folder / "tokens.npz")["train"]
    say(f"training on {len(tokens) / 1e6:.1f} M tokens")
    rows = []
    for row in train(trainer, tokens, options.train_seconds):
        rows.append({**row, "parameters": parameters})
        say(row)
    tables.write(options.out / "language_training.csv", rows, about)
    sources = tables.read(folder / "sources.csv")
    tables.write(options.out / "language_sources.csv", sources, {})
    trainer.model.save_pretrained(folder)
    torch.backends.cuda.enable_cudnn_sdp(True)


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
    ends = time.perf_counter() + options.measure_seconds
    records: list[Record] = []
    failed: set[str] = set()
    for first in range(0, len(documents), ROUND):
        batch = documents[first : first + ROUND]
        fresh: list[Record] = []
        for condition in conditions:
            if condition.name in failed:
                continue
            if first and time.perf_counter() > ends:
                break
            try:
                with under(condition, model, device):
                    fresh += perplexity(condition.name, model, batch, first, scale.lengths)
                    fresh += recall(condition.name, model, batch, first, scale.recall_lengths)
            except FAILURES:
                traceback.print_exc()
                failed.add(condition.name)
                print(f"{condition.name} failed and is left out", flush=True)
        else:
            records += [record for record in fresh if record.condition not in failed]
            say(f"{first + len(batch)} documents measured")
            write_summary(records, conditions, device, options.out, about)
            continue
        break
    say("failed:", sorted(failed) or "nothing")
    raw = [asdict(record) for record in records]
    tables.write(options.out / "language_records.csv", raw, {})


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
