"""What is measured of the trained language model, in which order, and its tables."""

from __future__ import annotations

import argparse
import itertools
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
from benchmarks.quality import layers, tables
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
from benchmarks.quality.language_model import FULL, TINY, Size, new_model
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
