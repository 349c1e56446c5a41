"""Perplexity by length and position, retrieval and copying of a language model, document by
document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.quality.intervals import ratio_interval
from benchmarks.quality.tasks import SLOT, Answer, questions

# Rows of one forward pass hold together at most so many tokens.
PASS_TOKENS = 32768
# Every length of context is judged by the same last tokens of a document.
JUDGED_TOKENS = 8192
# Retrievals asked for in a row: so many, or a third of the room.
PER_ROW = 40
# Logits of so many tokens at once.
HEAD_TOKENS = 8192
# Seeds of the questions differ by document and length.
LARGEST_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """What one document gave: `total` of a quantity that it has `count` of. `band` is the end of a
    span of positions, or of distances; 0 for all.
    """

    condition: str
    measure: str
    length: int
    band: int
    document: int
    total: float
    count: int


def bands(length: int) -> list[tuple[int, int]]:
    """Spans of positions that double, from 1024 on.

    >>> bands(4096)
    [(0, 1024), (1024, 2048), (2048, 4096)]
    """
    edges = [0]
    edge = min(1024, length)
    while edge < length:
        edges.append(edge)
        edge *= 2
    edges.append(length)
    return list(itertools.pairwise(edges))


@torch.inference_mode()
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Negative log-likelihood in nats of every token but the first, [B, S - 1] fp32; ids [B, S]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    flat, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
    parts = [
        F.cross_entropy(
            model.lm_head(flat[at : at + HEAD_TOKENS]).float(),
            targets[at : at + HEAD_TOKENS],
            reduction="none",
        )
        for at in range(0, len(flat), HEAD_TOKENS)
    ]
    return torch.cat(parts).view(len(ids), -1)


def perplexity(
    condition: str,
    model: Any,
    documents: Tensor,
    first: int,
    lengths: Sequence[int],
    judged: int = JUDGED_TOKENS,
) -> list[Record]:
    """The loss of the last `judged` tokens of documents [n, longest], numbered from `first`, with
    more and more of context: rows of each length up to `judged` that end with the document, or one
    row of a longer length (the first token of a row is not predicted). Of the whole document also
    by position.
    """
    found = []
    longest = documents.shape[1]
    for length in lengths:
        span = min(max(length, judged), longest)
        rows = documents[:, -span:].reshape(-1, length)
        step = max(1, PASS_TOKENS // length)
        losses = torch.cat(
            [token_losses(model, rows[at : at + step]) for at in range(0, len(rows), step)]
        )
        kept = losses[:, -judged:].reshape(len(documents), -1).double()
        found += [
            Record(condition, "perplexity", length, 0, first + at, total, kept.shape[1])
            for at, total in enumerate(kept.sum(1).tolist())
        ]
        if length == longest:
            for start, end in bands(length):
                # The loss of token t is at place t - 1.
                part = losses[:, max(0, start - 1) : end - 1].double()
                found += [
                    Record(condition, "position", length, end, first + at, total, part.shape[1])
                    for at, total in enumerate(part.sum(1).tolist())
                ]
    return found


@torch.inference_mode()
def answered(model: Any, ids: Tensor, answers: Sequence[Answer]) -> list[tuple[int, bool]]:
    """For each answer the tokens predicted right, each from the true ones before it, and whether
    all were.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = torch.tensor([a.row for a in answers for _ in range(a.first, a.last)])
    places = torch.tensor([place for a in answers for place in range(a.first, a.last)])
    rows, places = rows.to(ids.device), places.to(ids.device)
    guessed = model.lm_head(hidden[rows, places - 1]).argmax(1)
    right = (guessed == ids[rows, places]).tolist()
    found, at = [], 0
    for answer in answers:
        marks = right[at : at + answer.last - answer.first]
        at += len(marks)
        found.append((sum(marks), all(marks)))
    return found


@dataclass(frozen=True, slots=True)
class Exam:
    """Questions in the last tokens of some documents: rows [R, S] of one length, `of_row[r]` the
    number of the document that row r is from.
    """

    length: int
    ids: Tensor
    answers: tuple[Answer, ...]
    of_row: tuple[int, ...]


def exams(
    documents: Tensor, first: int, lengths: Sequence[int], judged: int = JUDGED_TOKENS
) -> list[Exam]:
    """Retrieval and copying at each length in documents [n, longest], numbered from `first`; the
    questions depend on the document's number and the length alone.
    """
    found = []
    for length in lengths:
        many = max(1, min(judged, documents.shape[1]) // length)
        asked = min(PER_ROW, length // SLOT // 3 - 1)
        rows, answers, of_row = [], [], []
        for at, document in enumerate(documents.cpu()):
            text = document[-many * length :].view(many, length)
            number = first + at
            ids, told = questions(text, asked, number * LARGEST_LENGTH + length)
            answers += [replace(answer, row=answer.row + len(of_row)) for answer in told]
            of_row += [number] * many
            rows.append(ids)
        ids = torch.cat(rows).to(documents.device)
        found.append(Exam(length, ids, tuple(answers), tuple(of_row)))
    return found


def recall(condition: str, model: Any, given: Sequence[Exam]) -> list[Record]:
    """Retrieval (whole answers) and copying (tokens), by document."""
    found = []
    for exam in given:
        step = max(1, PASS_TOKENS // exam.length)
        totals: dict[tuple[int, str, int], list[float]] = {}
        for at in range(0, len(exam.ids), step):
            part = [a for a in exam.answers if at <= a.row < at + step]
            moved = [replace(answer, row=answer.row - at) for answer in part]
            marks = answered(model, exam.ids[at : at + step], moved)
            for answer, (tokens, whole) in zip(part, marks, strict=True):
                if answer.task == "copy":
                    gained, of = float(tokens), answer.last - answer.first
                else:
                    gained, of = float(whole), 1
                band = next(end for _, end in bands(exam.length) if answer.distance <= end)
                for key in ((answer.task, 0), (answer.task, band)):
                    entry = totals.setdefault((exam.of_row[answer.row], *key), [0.0, 0])
                    entry[0] += gained
                    entry[1] += of
        found += [
            Record(condition, task, exam.length, band, number, total, int(count))
            for (number, task, band), (total, count) in totals.items()
        ]
    return found


def summarised(records: Sequence[Record], exact: str) -> list[dict[str, object]]:
    """One row a condition, measure, length and band, over the documents that every condition has:
    the mean with its interval, and the difference from `exact`, document by document, with its.
    """
    by_key: dict[tuple[str, str, int, int], dict[int, Record]] = {}
    for record in records:
        key = (record.condition, record.measure, record.length, record.band)
        by_key.setdefault(key, {})[record.document] = record
    rows = []
    for (condition, measure, length, band), found in by_key.items():
        same = by_key[exact, measure, length, band]
        documents = sorted(set(found) & set(same))
        if not documents:
            continue
        counts = _array([found[d].count for d in documents])
        totals = _array([found[d].total for d in documents])
        value = ratio_interval(totals, counts)
        apart = ratio_interval(totals - _array([same[d].total for d in documents]), counts)
        row: dict[str, object] = {
            "condition": condition,
            "measure": measure,
            "length": length,
            "band_end": band or "",
            "documents": len(documents),
            "count": int(counts.sum()),
            "mean": f"{value.value:.5f}",
            "mean_low": f"{value.low:.5f}",
            "mean_high": f"{value.high:.5f}",
            "minus_exact": f"{apart.value:.6f}",
            "minus_exact_low": f"{apart.low:.6f}",
            "minus_exact_high": f"{apart.high:.6f}",
            "perplexity": "",
        }
        if measure in ("perplexity", "position"):
            row["perplexity"] = f"{np.exp(value.value):.4f}"
        rows.append(row)
    return rows


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, np.float64)
