"""Long-range tasks woven into text: retrieve the value of a key seen long ago, repeat a passage
seen long ago. Token ids and positions alone, in numpy; pure given a generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.corpus import SPECIAL, VOCABULARY

FILE, END, COPY, PASTE, KEY, VALUE, ASK = range(len(SPECIAL))
KEY_TOKENS, VALUE_TOKENS = 2, 4
COPY_TOKENS = 32
# Every item lies in a slot of its own.
SLOT = 40
# How much more an answer counts than a token of text.
ANSWER_WEIGHT = 4.0

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens [first, last) of a row that a model can only know from `source`, where the item
    began; the token before each is what it is predicted from.
    """

    row: int
    task: str
    source: int
    first: int
    last: int

    @property
    def distance(self) -> int:
        return self.first - self.source


def _random(chance: np.random.Generator, count: int) -> Ids:
    """Tokens that are no marker."""
    return chance.integers(len(SPECIAL), VOCABULARY, count)


def _put(
    ids: NDArray[np.integer], weights: NDArray[np.float32], at: int, *parts: object
) -> tuple[int, int]:
    """Write an item into a row from `at` on: nothing in it counts in the loss, being random.
    Returns where the last part but the end marker starts and stops.
    """
    flat = np.concatenate([np.atleast_1d(np.asarray(part)) for part in (*parts, END)])
    ids[at : at + len(flat)] = flat
    weights[at : at + len(flat)] = 0.0
    length = len(np.atleast_1d(np.asarray(parts[-1])))
    return at + len(flat) - 1 - length, at + len(flat) - 1


def weave(
    ids: NDArray[np.integer],
    weights: NDArray[np.float32],
    row: int,
    task: str,
    source: int,
    target: int,
    chance: np.random.Generator,
) -> Answer:
    """Write one item at `source` and its question and answer at `target` into a row [S], and the
    weights of the loss [S]; both places must have `SLOT` tokens.
    """
    if task == "retrieval":
        key, value = _random(chance, KEY_TOKENS), _random(chance, VALUE_TOKENS)
        _put(ids, weights, source, KEY, key, VALUE, value)
        first, last = _put(ids, weights, target, ASK, key, VALUE, value)
    elif task == "copy":
        passage = _random(chance, COPY_TOKENS)
        _put(ids, weights, source, COPY, passage)
        first, last = _put(ids, weights, target, PASTE, passage)
    else:
        raise ValueError(f"no such task: {task}")
    weights[first:last] = ANSWER_WEIGHT
    return Answer(row, task, source, first, last)


def training_row(
    text: NDArray[np.integer], items: int, chance: np.random.Generator
) -> tuple[Ids, NDArray[np.float32]]:
    """A row of text [S] with one copy and `items` - 1 retrievals at random places (fewer where the
    row is short), and the weights of its loss [S].
    """
    ids, weights = text.astype(np.int64), np.ones(len(text), np.float32)
    slots = len(text) // SLOT
    items = min(items, slots // 3)
    if items == 0:
        return ids, weights
    pairs = np.sort(chance.choice(slots, (items, 2), replace=False), 1) * SLOT
    for number, (source, target) in enumerate(pairs.tolist()):
        task = "copy" if number == 0 else "retrieval"
        weave(ids, weights, 0, task, source, target, chance)
    return ids, weights


def questions(
    text: NDArray[np.integer], per_row: int, chance: np.random.Generator
) -> tuple[Ids, list[Answer]]:
    """Rows of text [B, S] with `per_row` retrievals at evenly spread depths and one copy at a
    random one; everything is asked at the end of the row, in random order.
    """
    ids = text.astype(np.int64)
    answers: list[Answer] = []
    size = ids.shape[1]
    asked = per_row + 1
    slots = size // SLOT - asked
    if slots < asked:
        raise ValueError(f"{size} tokens are too few for {asked} items of {SLOT}")
    ends = size - SLOT * (1 + np.arange(asked))
    for row in range(len(ids)):
        spread = (np.arange(asked) * slots + chance.integers(0, slots, asked)) // asked
        depths = chance.permutation(spread) * SLOT
        weights = np.ones(size, np.float32)
        for number, (source, target) in enumerate(zip(depths.tolist(), ends.tolist(), strict=True)):
            task = "copy" if number == 0 else "retrieval"
            answers.append(weave(ids[row], weights, row, task, source, target, chance))
    return ids, answers
