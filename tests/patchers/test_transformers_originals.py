"""Calls of patched transformers models that only the original can serve: attention maps, gradients
and dropout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.transformers_models import (
    PATCHABLE,
    first_output,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    tiny_t5,
    tiny_whisper,
)
from torch import Tensor, nn

import sagepatch
from sagepatch.patchers.transformers_attention import DROPOUT, MAP_WANTED, TRAINING


def _patch(model: nn.Module) -> sagepatch.Patch:
    return sagepatch.apply(model, variant="sage2_8", emulate=True)


def _quantised(patch: sagepatch.Patch) -> int:
    return sum(layer.record.by_variant.get("emulated.sage2_8", 0) for layer in patch.layers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny_bert, tiny_llama, tiny_t5, tiny_whisper, tiny_gpt2])
def test_a_call_that_wants_maps_gets_them(build: Any, implementation: str) -> None:
    # case 45
    model, inputs = build()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True)
    model.set_attn_implementation(implementation)
    patch = _patch(model)
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    compared = 0
    for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for ours, theirs in zip(getattr(out, kind, ()), getattr(maps, kind, ()), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
            compared += 1
    assert compared == len(patch.layers)
    assert all(layer.record.notes == [MAP_WANTED] for layer in patch.layers)
    first_output(model, inputs)
    assert all(layer.record.fallbacks == {MAP_WANTED: 1} for layer in patch.layers)
    assert _quantised(patch) == len(patch.layers)


def _gradients(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    out = model(**inputs)
    out[0].float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "gemma2", "gpt_oss", "whisper"])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_gradients_are_the_model_s_own(family: str, mode: str) -> None:
    # case 46
    model, inputs = PATCHABLE[family]()
    model.train(mode == "train")
    plain = _gradients(model, inputs)
    patch = _patch(model)
    ours = _gradients(model, inputs)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    reasons = {reason for layer in patch.layers for reason in layer.record.fallbacks}
    assert reasons <= {TRAINING, DROPOUT}
    assert _quantised(patch) == 0


def test_lora_learns_as_unpatched() -> None:
    # case 46
    from peft import LoraConfig, get_peft_model

    model, inputs = tiny_llama()
    torch.manual_seed(4)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    plain = _gradients(model, inputs)
    patch = _patch(model)
    ours = _gradients(model, inputs)
    assert any("q_proj.lora_A" in name for name in ours)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    first_output(model, inputs)
    assert _quantised(patch) == 3


def test_dropout_is_the_model_s_own() -> None:
    model, inputs = tiny_bert()
    model.train()
    patch = _patch(model)
    with torch.no_grad():
        model(**inputs)
    assert all(layer.record.fallbacks == {DROPOUT: 1} for layer in patch.layers)
