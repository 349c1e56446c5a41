"""Perplexity by length and position, retrieval and copying of a language model, document by
document.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
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
# Retrievals asked for in a row: so many, or a third of the room.
PER_ROW, MOST_ROWS = 24, 4
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
    condition: str, model: Any, documents: Tensor, first: int, lengths: Sequence[int]
) -> list[Record]:
    """Documents [n, longest], numbered from `first`, in rows of each length: the same tokens with
    more and more of context.
    """
    found = []
    longest = documents.shape[1]
    for length in lengths:
        rows = documents.reshape(-1, length)
        step = max(1, PASS_TOKENS // length)
        losses = torch.cat(
            [token_losses(model, rows[at : at + step]) for at in range(0, len(rows), step)]
        )
        by_document = losses.view(len(documents), -1).double().sum(1).tolist()
        count = (longest // length) * (length - 1)
        found += [
            Record(condition, "perplexity", length, 0, first + at, total, count)
            for at, total in enumerate(by_document)
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


def recall(
    condition: str, model: Any, documents: Tensor, first: int, lengths: Sequence[int]
) -> list[Record]:
    """Retrieval (whole answers) and copying (tokens) in documents [n, longest], numbered from
    `first`; the questions depend on the document's number and the length alone.
    """
    found = []
    for length in lengths:
        rows = min(MOST_ROWS, documents.shape[1] // length)
        for at, document in enumerate(documents.cpu()):
            number = first + at
            text = document[: rows * length].view(rows, length)
            asked = min(PER_ROW, length // SLOT // 3 - 1)
            ids, answers = questions(text, asked, number * LARGEST_LENGTH + length)
            marks = answered(model, ids.to(documents.device), answers)
            totals: dict[tuple[str, int], list[float]] = {}
            for answer, (tokens, whole) in zip(answers, marks, strict=True):
                if answer.task == "copy":
                    gained, of = float(tokens), answer.last - answer.first
                else:
                    gained, of = float(whole), 1
                band = next(end for _, end in bands(length) if answer.distance <= end)
                for key in ((answer.task, 0), (answer.task, band)):
                    entry = totals.setdefault(key, [0.0, 0])
                    entry[0] += gained
                    entry[1] += of
            found += [
                Record(condition, task, length, band, number, total, int(count))
                for (task, band), (total, count) in totals.items()
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
