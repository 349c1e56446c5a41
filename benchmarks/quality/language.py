"""A language model trained on the spot, and what each way to run its attention does to it.

    python -m benchmarks.quality.language [--train-seconds 140] [--measure-seconds 70]

On one H200 about four minutes: trains a Llama of 38 M parameters from random weights on Python
sources under open licences (`corpus`), with retrieval and copying tasks woven in, up to 32k tokens
a row; then perplexity at 1k to 32k on folders that were held out, by position, retrieval and
copying, for exact attention, every recipe's kernel, the calibrated plan and the baselines, all
through `sagepatch.apply`, on as many documents as the time allows, the most for what matters most.
Writes language_*.csv beside this file, or under --out, after each round of documents. `--tiny`
proves on a CPU that the script runs; its numbers mean nothing. `--keep FOLDER` leaves the model
there, and `--model FOLDER` measures one that is there.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import sagepatch
from benchmarks.quality import ahead, layers, tables
from benchmarks.quality.baselines import FP8_PER_TENSOR, NAIVE_INT8
from benchmarks.quality.conditions import (
    EXACT,
    FAILURES,
    FIRST,
    Condition,
    baselines,
    recipes,
    under,
)
from benchmarks.quality.corpus import VOCABULARY
from benchmarks.quality.language_measure import (
    Exam,
    Record,
    exams,
    perplexity,
    recall,
    summarised,
)
from benchmarks.quality.language_model import FULL, TINY, Size, Trainer, new_model, train
from sagepatch.plan import Plan

LENGTHS = (1024, 4096, 8192, 16384, 32768)
RECALL_LENGTHS = (4096, 8192, 16384, 32768)
TINY_LENGTHS = (512, 1024)
# Documents of one turn of a condition, and at most in all.
TURN, MOST_DOCUMENTS = 2, 40
# Turns of what matters less, and of what is computed in plain torch, with every score in memory,
# in contexts up to so many tokens.
OTHER_TURNS, PLAIN_TURNS, PLAIN_LONGEST = 3, 2, 8192
LAYER_TOKENS = 2048
CALIBRATION_ROWS = 4
# In the model's folder when it is whole.
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of everything: the model and the lengths measured."""

    size: Size
    lengths: tuple[int, ...]
    recall_lengths: tuple[int, ...]
    layer_tokens: int


FULL_SCALE = Scale(FULL, LENGTHS, RECALL_LENGTHS, LAYER_TOKENS)
TINY_SCALE = Scale(TINY, TINY_LENGTHS, TINY_LENGTHS[-1:], 512)


@dataclass(frozen=True, slots=True)
class Turn:
    """One condition on documents [first, last)."""

    condition: Condition
    first: int
    last: int


started = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s]", *words, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--train-seconds", type=float, default=140)
    parser.add_argument("--measure-seconds", type=float, default=70)
    parser.add_argument("--train-until", type=float, help="train no longer than until then")
    parser.add_argument("--until", type=float, help="begin no turn that would end after so long")
    parser.add_argument("--most-megabytes", type=float, default=120)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--command", help="what its rows say that made them")
    parser.add_argument("--deadline", type=float, help="as --until, in seconds of Unix time")
    return parser.parse_args()


def main() -> None:
    """Train in this process and measure in another, which makes its kernels ready meanwhile."""
    options = parsed()
    scale = TINY_SCALE if options.tiny else FULL_SCALE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ahead.share_cache()
    about = tables.provenance(tables.command_of("language", sys.argv[1:]), options.commit)
    if ahead.is_rehearsal():
        ahead.rehearse(rehearsal(scale, device))
        return
    if options.model is not None:
        measure_model(options, scale, device, about)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "model"
        (folder / TRAINED).unlink(missing_ok=True)
        corpus = start_corpus(options, folder, about)
        # The backward of cuDNN's attention has given NaN (torch 2.11, H200).
        torch.backends.cuda.enable_cudnn_sdp(False)
        trainer = Trainer(scale.size, device, not options.no_compile and device.type == "cuda")
        trainer.warm()
        say("compiled")
        measurer = start_measurer(options, folder, about)
        try:
            trained(options, trainer, corpus, folder, about)
        except BaseException:
            measurer.terminate()
            raise
        del trainer
        torch.cuda.empty_cache()
        raise SystemExit(measurer.wait())


def start_measurer(
    options: argparse.Namespace, folder: Path, about: dict[str, str]
) -> subprocess.Popen[bytes]:
    """This script again, for the model that will be in `folder`; its rows are those of this
    command.
    """
    words = ["--model", str(folder), "--out", str(options.out), "--commit", about["commit"]]
    words += ["--command", about["command"], "--measure-seconds", str(options.measure_seconds)]
    words += ["--tiny"] if options.tiny else []
    if options.until:
        ends = time.time() + options.until - (time.perf_counter() - started)
        words += ["--deadline", str(ends)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.quality.language", *words])


def measure_model(
    options: argparse.Namespace, scale: Scale, device: torch.device, about: dict[str, str]
) -> None:
    """Everything after the training: `rehearsal` once, so that every kernel is there, then the
    model, when it is there.
    """
    if options.command:
        about = {**about, "command": options.command}
    if device.type == "cuda":
        words = ["--tiny"] if options.tiny else []
        helpers = ahead.start("benchmarks.quality.language", words)
        say("compiled ahead:", [helper.wait() for helper in helpers])
        for _, run in rehearsal(scale, device):
            try:
                run()
            except FAILURES:
                traceback.print_exc()
        say("every kernel was run")
    while not (options.model / TRAINED).exists():
        time.sleep(0.1)
    model, held, text = loaded(options.model, device)
    say("model loaded")
    try:
        plan = calibrated(model, text, scale, device)
        plan.save(options.out / "language_plan.json")
        chosen = [Condition("calibrated plan", "plan", plan)]
    except FAILURES:
        traceback.print_exc()
        chosen = []
    measure(model, held, text, scale, device, chosen, options, about)


def rehearsal(scale: Scale, device: torch.device) -> list[tuple[str, Callable[[], object]]]:
    """Named work that calls every kernel as the measuring does, on one layer with random
    weights.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = new_model(replace(scale.size, layers=1), device, dtype).eval()
    longest = max(scale.lengths)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (1 + TURN) * longest).astype(np.uint16)
    documents = documents_of(text[: TURN * longest], longest, device)
    ids = torch.from_numpy(text[: scale.layer_tokens].astype(np.int64)).to(device)[None]
    work: list[tuple[str, Callable[[], object]]] = [
        ("calibration", lambda: calibrated(model, text, scale, device))
    ]

    def one(condition: Condition) -> None:
        # The questions are asked in calls of the same sizes.
        measured(model, condition, documents, 0, (), scale, device)
        with torch.inference_mode():
            run = partial(model.model, input_ids=ids, use_cache=False)
            layers.rows(layers.captured(model, run, (1,)), [condition])

    work += [(found.name, partial(one, found)) for found in (EXACT, *recipes(device), *baselines())]
    return work


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
    seconds = options.train_seconds
    if options.train_until:
        seconds = min(seconds, options.train_until - (time.perf_counter() - started))
    for row in train(trainer, tokens, seconds):
        rows.append({**row, "parameters": parameters})
        say(row)
    tables.write(options.out / "language_training.csv", rows, about)
    sources = tables.read(folder / "sources.csv")
    tables.write(options.out / "language_sources.csv", sources, {})
    trainer.model.save_pretrained(folder)
    (folder / TRAINED).touch()


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
    """The plan of a calibration on a few rows of the training text, at the longest length."""
    longest = max(scale.lengths)
    ids = documents_of(text[: CALIBRATION_ROWS * longest], longest, device)

    def run() -> None:
        with torch.inference_mode():
            for row in ids:
                model.model(input_ids=row[None], use_cache=False)

    plan = sagepatch.calibrate(model, run=run, emulate=device.type == "cpu").plan()
    say("plan:", Condition("plan", "plan", plan).kernel(device))
    return plan


def measured(
    model: Any,
    condition: Condition,
    documents: Tensor,
    first: int,
    given: Sequence[Exam],
    scale: Scale,
    device: torch.device,
) -> list[Record]:
    """One condition on documents [n, longest], numbered from `first`, and on their questions."""
    longest = PLAIN_LONGEST if is_plain(condition) else max(scale.lengths)
    lengths = [length for length in scale.lengths if length <= longest]
    with torch.inference_mode(), under(condition, model, device):
        return [
            *perplexity(condition.name, model, documents, first, lengths),
            *recall(condition.name, model, [exam for exam in given if exam.length <= longest]),
        ]


def is_plain(condition: Condition) -> bool:
    """Whether a condition is computed in plain torch, with all scores of a few rows in memory."""
    return condition.name in (NAIVE_INT8, FP8_PER_TENSOR)


def turns(plans: Sequence[Condition], device: torch.device, documents: int) -> list[Turn]:
    """What is measured, in order: everything on the first documents, then more and more of them for
    exact attention, the plan and the recipes of `FIRST`, with a few for the others.
    """
    found = recipes(device)
    main = [EXACT, *plans, *(one for one in found if one.name in FIRST)]
    kernels = [one for one in found if one.name not in FIRST]
    kernels += [one for one in baselines() if not is_plain(one)]
    plain = [one for one in baselines() if is_plain(one)]
    order = []
    for number, at in enumerate(range(0, documents, TURN)):
        due = list(main)
        due += kernels if number < OTHER_TURNS else []
        due += plain if number < PLAIN_TURNS else []
        order += [Turn(condition, at, min(at + TURN, documents)) for condition in due]
    return order


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
    text: NDArray[np.uint16],
    scale: Scale,
    device: torch.device,
    plans: Sequence[Condition],
    options: argparse.Namespace,
    about: dict[str, str],
) -> None:
    """Turns until the time is up; what was measured is written after each round of documents."""
    documents = documents_of(held, max(scale.lengths), device)[:MOST_DOCUMENTS]
    say(f"{len(documents)} held-out documents of {max(scale.lengths)} tokens")
    order = turns(plans, device, len(documents))
    conditions = [EXACT, *plans, *recipes(device), *baselines()]
    records: list[Record] = []
    failed: set[str] = set()
    took: dict[str, list[float]] = {}
    ends = time.perf_counter() + options.measure_seconds
    if options.until:
        ends = started + options.until
    if options.deadline:
        ends = time.perf_counter() + options.deadline - time.time()
    for first, due in itertools.groupby(order, key=lambda turn: turn.first):
        batch = documents[first : first + TURN]
        given = exams(batch, first, scale.recall_lengths)
        for turn in due:
            name = turn.condition.name
            began = time.perf_counter()
            # The first turn of a condition loads its kernels, the later ones take as long as ever.
            late = began + min(took.get(name, [0.0])) > ends
            if name in failed or late:
                continue
            try:
                records += measured(model, turn.condition, batch, first, given, scale, device)
            except FAILURES:
                traceback.print_exc()
                failed.add(name)
                records = [record for record in records if record.condition != name]
                print(f"{name} failed and is left out", flush=True)
            took.setdefault(name, []).append(time.perf_counter() - began)
            if not first:
                # What a run that is cut off leaves.
                tables.write(options.out / "language_records.csv", list(map(asdict, records)), {})
        if not first and time.perf_counter() < ends:
            say("a turn:", {name: round(times[0], 2) for name, times in took.items()})
            write_layers(model, text, scale, device, conditions, options.out, about)
            write_summary(records, conditions, device, options.out, about)
        if records:
            tables.write(options.out / "language_records.csv", list(map(asdict, records)), {})
        if time.perf_counter() > ends:
            break
    say(f"{first + len(batch)} documents; failed:", sorted(failed) or "nothing")
    if not records:
        return
    say("the last turn:", {name: round(times[-1], 2) for name, times in took.items()})
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
