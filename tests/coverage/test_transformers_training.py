"""Training through patched models: gradients are the model's own, or strict mode says that no
kernel ran. Tiny models of true classes, and of modules that call SDPA themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.diffusers_models import tiny_flux, tiny_unet
from models.transformers_models import tiny_bert, tiny_falcon, tiny_gemma2, tiny_llama
from torch import Tensor, nn
from transformers_tiny import Tiny, installed
from transformers_types import model_types

import sagepatch
from sagepatch.backends.catalogue import SDPA
from sagepatch.errors import StrictFallback
from sagepatch.layer import SHORT
from sagepatch.patchers.transformers_attention import DROPOUT, MAP_WANTED, TRAINING

QUICK = (
    *("bart", "bert", "deepseek_v3", "falcon", "gemma2", "gpt_oss", "llama4_text", "modernbert"),
    *("qwen2_5_vl_vision", "qwen3_moe", "swin", "t5gemma", "videomae", "whisper"),
)
# Its first cycles run without gradients in training too: there no_grad means kernels, as anywhere.
UNLIKE = ("hrm_text",)


def _gradients(tiny: Tiny) -> dict[str, Tensor]:
    tiny.model.zero_grad()
    torch.manual_seed(1)
    out = tiny.model(**tiny.inputs)
    loss = torch.stack([t.double().square().mean() for t in _trained(out)]).sum()
    loss.backward()
    named = tiny.model.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def _trained(out: Any) -> list[Tensor]:
    values = out.values() if isinstance(out, dict) else out
    return [v for v in values if isinstance(v, Tensor) and v.requires_grad]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in model_types("patched")
        if name not in UNLIKE
    ],
)
def test_gradients_of_a_family_are_its_own(model_type: str) -> None:
    # case 46
    tiny = installed(model_type, reached=True)
    plain = _gradients(tiny)
    assert plain
    patch = sagepatch.apply(tiny.model, variant="sage2_8", emulate=True)
    ours = _gradients(tiny)
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert all(set(layer.record.by_variant) == {"sdpa.exact"} for layer in patch.layers)
    assert all(set(layer.record.fallbacks) <= {TRAINING, SHORT} for layer in patch.layers)


STRICT = {"variant": "sage2_8", "emulate": True, "strict": True}


@pytest.mark.parametrize("build_model", [tiny_llama, tiny_falcon, tiny_flux, tiny_unet])
def test_strict_refuses_inputs_that_need_gradients(build_model: Any) -> None:
    # case 46
    model, inputs = build_model()
    patch = sagepatch.apply(model, **STRICT)
    with pytest.raises(StrictFallback, match="training: gradients") as refused:
        model(**inputs)
    assert refused.value.site == patch.layers[0].name
    with torch.no_grad():
        model(**inputs)
    assert all("emulated.sage2_8" in layer.record.by_variant for layer in patch.layers)
    patch.restore()
    model(**inputs)


def test_strict_refuses_dropout_and_maps() -> None:
    model, inputs = tiny_bert()
    sagepatch.apply(model, **STRICT)
    model.train()
    with torch.no_grad(), pytest.raises(StrictFallback, match=DROPOUT):
        model(**inputs)
    model.eval()
    with torch.no_grad(), pytest.raises(StrictFallback, match=MAP_WANTED.partition(":")[0]):
        model(**inputs, output_attentions=True)


def test_strict_says_nothing_where_exact_was_asked_for_or_is_the_rule() -> None:
    model, inputs = tiny_llama()
    patch = sagepatch.apply(model, variant="exact", strict=True)
    model(**inputs)
    assert all(layer.record.by_variant == {SDPA.name: 1} for layer in patch.layers)
    patch = sagepatch.apply(model, **STRICT)
    model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    # The prompt by the kernel, each single token after it exactly.
    assert all(
        set(layer.record.by_variant) == {"emulated.sage2_8", SDPA.name} for layer in patch.layers
    )


def test_a_step_of_training_is_the_model_s_own() -> None:
    # case 46: three steps with an optimiser, evaluation with kernels between them
    losses: list[list[float]] = []
    for patched in (False, True):
        model, inputs = tiny_llama()
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True) if patched else None
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(3):
            model.train()
            loss = model(**inputs, labels=inputs["input_ids"]).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
            model.eval()
            with torch.no_grad():
                model(**inputs)
        if patch is not None:
            for layer in patch.layers:
                assert layer.record.by_variant == {"sdpa.exact": 3, "emulated.sage2_8": 3}
    assert losses[0] == losses[1]
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("build_model", [tiny_llama, tiny_gemma2, tiny_falcon])
def test_activation_checkpointing(build_model: Any, reentrant: bool) -> None:
    # case 46: reentrant checkpoints run their first forward without gradients. It must not be
    # quantised, or the backward would differentiate another forward than the one that was used.
    model, inputs = build_model()
    plain = _step(model, inputs, reentrant)
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    ours = _step(model, inputs, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def _step(model: nn.Module, inputs: dict[str, Any], reentrant: bool) -> list[Tensor]:
    model.train()
    switch = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    switch({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]
