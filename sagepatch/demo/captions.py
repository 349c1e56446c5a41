"""Holds what the demo pipeline was taught to draw, and the captions nearest to a prompt."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "captions.json"
# As the pipeline's word tokenizer splits.
WORD = re.compile(r"\w+")
# Words of two spellings ("elefant") count as related from this overlap of letter pairs on.
LEAST_RELATED = 0.5


@dataclass(frozen=True)
class _Corpus:
    captions: tuple[str, ...]
    words: frozenset[str]
    bags: tuple[frozenset[str], ...]
    weights: dict[str, float]


@cache
def _corpus() -> _Corpus:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    captions = tuple(stored["captions"])
    bags = tuple(frozenset(_split(caption)) for caption in captions)
    counts = Counter(word for bag in bags for word in bag)
    weights = {word: math.log(len(bags) / count) for word, count in counts.items()}
    return _Corpus(captions, frozenset(stored["words"]), bags, weights)


def _split(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _pairs(word: str) -> Counter[str]:
    padded = f"^{word}$"
    return Counter(padded[i : i + 2] for i in range(len(padded) - 1))


def _related(first: str, second: str) -> float:
    """Overlap of letter pairs in 0..1 (Dice); 1 for equal words."""
    if first == second:
        return 1.0
    a, b = _pairs(first), _pairs(second)
    overlap = 2 * (a & b).total() / (a.total() + b.total())
    return overlap if overlap >= LEAST_RELATED else 0.0


def unknown_words(prompt: str) -> list[str]:
    """Words of the prompt that the pipeline has never met, in order, each once, lower case.

    >>> unknown_words("a red aardvark")
    ['aardvark']
    """
    known = _corpus().words
    return [word for word in dict.fromkeys(_split(prompt)) if word not in known]


def nearest_captions(prompt: str, n: int = 3) -> list[str]:
    """The n captions of the training most like the prompt, the best first.

    Rare words weigh more than common ones, and a misspelt word counts for those it resembles.

    >>> nearest_captions("a red aple", 1)
    ['a red apple']
    """
    corpus = _corpus()
    asked = dict.fromkeys(_split(prompt))
    top = math.log(len(corpus.captions))
    # For each caption word the best match among the prompt's words, and for whose sake.
    scores: dict[str, dict[str, float]] = {}
    for word in asked:
        for other in corpus.weights:
            related = _related(word, other)
            if related:
                scores.setdefault(other, {})[word] = related
    wanted = sum(corpus.weights.get(word, top) for word in asked) or 1.0

    def likeness(index: int) -> float:
        bag = corpus.bags[index]
        shared = sum(
            corpus.weights[word] * max(scores[word].values()) for word in bag if word in scores
        )
        return 2 * shared / (wanted + sum(corpus.weights[word] for word in bag))

    order = sorted(range(len(corpus.captions)), key=lambda i: (-likeness(i), i))
    return [corpus.captions[i] for i in order[: max(n, 0)]]
