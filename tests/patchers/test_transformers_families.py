"""transformers' true classes, tiny: patched they stay close, run the quantised kernel in every
layer, and come back bit-equal.
"""

from __future__ import annotations

import pytest
import torch
from models.transformers_models import PATCHABLE, first_output, tiny_bert, tiny_clip, tiny_t5
from torch import Tensor, nn

import sagepatch
from sagepatch.patchers.transformers import find

RECIPES = ("sage2_8", "sage1_b")


def _facts(model: nn.Module) -> list[object]:
    implementations = [
        (name, module.config._attn_implementation)
        for name, module in model.named_modules()
        if hasattr(module, "config")
    ]
    attributes = [(name, set(vars(module))) for name, module in model.named_modules()]
    return [list(model.state_dict()), model.config.to_dict(), implementations, attributes]


def _distance(out: Tensor, plain: Tensor) -> float:
    return float((out - plain).norm() / plain.norm())


def _close(out: Tensor, plain: Tensor) -> bool:
    """What quantised attention may cost a whole model, and that it was not exact."""
    cosine = torch.cosine_similarity(out.flatten(), plain.flatten(), dim=0)
    ratio = out.norm() / plain.norm()
    return bool(cosine >= 0.99 and 0 < _distance(out, plain) <= 0.15 and abs(ratio - 1) <= 0.05)


@pytest.mark.parametrize("family", PATCHABLE)
def test_exact_layers_compute_what_the_model_did(family: str) -> None:
    # masks, causality, windows, soft caps, sinks and biases mean the same to us
    model, inputs = PATCHABLE[family]()
    plain = first_output(model, inputs)
    patch = sagepatch.apply(model, variant="exact")
    assert _distance(first_output(model, inputs), plain) < 1e-5
    assert all(set(layer.record.by_variant) == {"sdpa.exact"} for layer in patch.layers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", PATCHABLE)
def test_close_counted_and_restored(family: str, recipe: str) -> None:
    # cases 11, 12, 33, 37, 42, 44
    model, inputs = PATCHABLE[family]()
    plain, facts = first_output(model, inputs), _facts(model)
    patch = sagepatch.apply(model, variant=recipe, emulate=True)
    assert list(model.state_dict()) == facts[0]
    assert model.config.to_dict() == facts[1]
    out = first_output(model, inputs)
    assert _close(out, plain)
    assert not patch.left
    for layer in patch.layers:
        assert set(layer.record.by_variant) == {f"emulated.{recipe}"}, layer.name
    patch.restore()
    assert _facts(model) == facts
    assert torch.equal(first_output(model, inputs), plain)


@pytest.mark.parametrize("family", ["llama", "bert", "vit", "t5", "whisper", "gpt2", "mistral"])
def test_models_that_were_eager_come_back_eager(family: str) -> None:
    model, inputs = PATCHABLE[family]()
    model.set_attn_implementation("eager")
    plain, facts = first_output(model, inputs), _facts(model)
    patch = sagepatch.apply(model, variant="sage1_b", emulate=True)
    assert _close(first_output(model, inputs), plain)
    assert all(set(layer.record.by_variant) == {"emulated.sage1_b"} for layer in patch.layers)
    patch.restore()
    assert _facts(model) == facts
    assert torch.equal(first_output(model, inputs), plain)


def _specs(patch: sagepatch.Patch) -> dict[str, str]:
    return {layer.name: str(next(iter(layer.record.specs))) for layer in patch.layers}


def test_each_tower_has_its_rows() -> None:
    # case 44: the text tower is causal without a mask, the vision tower is not
    model, inputs = tiny_clip()
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    first_output(model, inputs)
    specs = _specs(patch)
    assert "causal" in specs["text_model.encoder.layers.0.self_attn"]
    assert "causal" not in specs["vision_model.encoder.layers.0.self_attn"]


def test_one_tower_alone() -> None:
    # cases 34, 44: the text tower of a model is patched as a model of its own
    model, inputs = tiny_clip()
    plain = first_output(model, inputs)
    patch = sagepatch.apply(model.text_model, variant="sage2_8", emulate=True)
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert _close(first_output(model, inputs), plain)
    assert len(patch.layers) == 2
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)


def test_short_windows_are_calls_of_their_own() -> None:
    # case 44: four windows of 16 patches, then the whole picture
    model, inputs = PATCHABLE["qwen25_vl_vision"]()
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    first_output(model, inputs)
    assert [layer.record.calls for layer in patch.layers] == [4, 1]
    # Without emulation a machine keeps what is short exact by rule.
    patch = sagepatch.apply(model, variant="auto").lock()
    first_output(model, inputs)
    assert all(set(layer.record.by_variant) == {"sdpa.exact"} for layer in patch.layers)


def test_kinds_of_an_encoder_decoder() -> None:
    kinds = {site.name: site.kind for site in find(tiny_t5()[0], "").sites}
    assert kinds["decoder.block.0.layer.0.SelfAttention"] == "self"
    assert kinds["decoder.block.0.layer.1.EncDecAttention"] == "cross"
    whisper = {site.name: site.kind for site in find(PATCHABLE["whisper"]()[0], "").sites}
    assert whisper["model.decoder.layers.0.encoder_attn"] == "cross"
    assert whisper["model.decoder.layers.0.self_attn"] == "self"


def test_position_bias_is_an_additive_mask() -> None:
    model, inputs = tiny_t5()
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    first_output(model, inputs)
    specs = _specs(patch)
    assert "mask additive" in specs["encoder.block.1.layer.0.SelfAttention"]
    assert "mask additive causal +0" in specs["decoder.block.1.layer.0.SelfAttention"]


def test_soft_cap_and_sinks_reach_the_kernel() -> None:
    for family, term in (("gemma2", "softcap"), ("gpt_oss", "sinks")):
        model, inputs = PATCHABLE[family]()
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
        first_output(model, inputs)
        assert all(term in spec for spec in _specs(patch).values())


def test_bert_hides_its_padding() -> None:
    # case 20
    model, inputs = tiny_bert()
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    out = first_output(model, inputs)
    other = inputs["input_ids"].clone()
    other[1, 13:] = 7
    assert torch.equal(first_output(model, inputs | {"input_ids": other})[1, :13], out[1, :13])
