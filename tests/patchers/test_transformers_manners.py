"""Manners of the transformers patcher: what it leaves alone, other models, and the way back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models.transformers_models import (
    PATCHABLE,
    first_output,
    ids,
    tiny_bert,
    tiny_clip,
    tiny_deepseek_v32,
    tiny_llama,
)
from torch import Tensor, nn
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

import sagepatch
from sagepatch.errors import NothingPatched
from sagepatch.patchers.code import compares_implementation
from sagepatch.patchers.model import Parts, search
from sagepatch.patchers.transformers import find
from sagepatch.patchers.transformers_attention import register


def _patch(model: nn.Module, variant: str = "sage2_8") -> sagepatch.Patch:
    return sagepatch.apply(model, variant=variant, emulate=True)


def _quantised(patch: sagepatch.Patch) -> int:
    return sum(layer.record.by_variant.get("emulated.sage2_8", 0) for layer in patch.layers)


# What is left alone


def test_flash_attention_is_left() -> None:
    model, _ = tiny_llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    left = find(model, "lm").left
    assert [layer.name for layer in left] == [f"lm.model.layers.{i}.self_attn" for i in range(3)]
    assert "set_attn_implementation('sdpa')" in left[0].reason


def test_a_model_that_always_gives_maps_is_left() -> None:
    model, _ = tiny_bert()
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(NothingPatched, match="output_attentions"):
        sagepatch.apply(model)


@pytest.mark.skipif(
    "indexed_attention" not in ALLOWED_LAYER_TYPES, reason="this transformers has no such layers"
)
def test_an_indexed_mask_is_left() -> None:
    model, inputs = tiny_deepseek_v32()
    plain = first_output(model, inputs)
    with pytest.raises(NothingPatched, match="sparse"):
        sagepatch.apply(model)
    assert torch.equal(first_output(model, inputs), plain)


INDEXED = {
    "axk2": "AXK2Attention",
    "deepseek_v32": "DeepseekV32Attention",
    "dots3_note": "Dots3NoteTextAttention",
    "glm5_next": "Glm5NextTextAttention",
    "glm_moe_dsa": "GlmMoeDsaAttention",
    "hy_v4": "HYV4Attention",
    "hy_v4_vl": "HYV4VLAttention",
    "minimax_m3_vl": "MiniMaxM3VLAttention",
    "mistral_large4": "MistralLarge4TextAttention",
}


@pytest.mark.parametrize("family", INDEXED)
def test_families_that_branch_on_names_are_recognised(family: str) -> None:
    name = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(name, reason="this transformers is older than the family")
    assert compares_implementation(getattr(module, INDEXED[family]))


def test_usual_families_are_not() -> None:
    for family in ("llama", "bert", "t5", "gpt_oss", "qwen25_vl_vision"):
        model, _ = PATCHABLE[family]()
        assert not find(model, "").left


def test_a_mention_of_sdpa_is_no_comparison() -> None:
    sam2 = pytest.importorskip("transformers.models.sam2.modeling_sam2")
    assert not compares_implementation(sam2.Sam2Attention)


def test_sam_calls_sdpa_itself_or_not_at_all() -> None:
    from transformers import SamVisionConfig, SamVisionModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    for implementation, found in (("sdpa", 1), ("eager", 0)):
        config = SamVisionConfig(**sizes, attn_implementation=implementation)
        both = search(Parts("", {"": SamVisionModel(config)}))
        assert (len(both.sites), len(both.left)) == (found, 1 - found)


# Names and masks


def test_both_registries_are_filled_in_one_step() -> None:
    # case 41
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    register()
    ours = {name for name in AttentionInterface._global_mapping if "sagepatch" in name}
    masks = {name for name in AttentionMaskInterface._global_mapping if "sagepatch" in name}
    assert ours == masks == {"sagepatch", "sagepatch_masked", "sagepatch_eager"}
    assert AttentionMaskInterface._global_mapping["sdpa"] is not None
    assert not any(word in name for name in ours for word in ("sdpa", "flash", "flex", "/", "|"))


def test_nothing_of_torch_or_transformers_changes() -> None:
    # case 32
    from transformers import AttentionInterface, LlamaForCausalLM

    model, inputs = tiny_llama()
    sdpa, forward = F.scaled_dot_product_attention, LlamaForCausalLM.forward
    known = {k: v for k, v in AttentionInterface._global_mapping.items() if "sagepatch" not in k}
    clip, clip_inputs = tiny_clip()
    plain = first_output(clip, clip_inputs)
    _patch(model)
    seen: list[Tensor] = []
    model.model.layers[1].register_forward_hook(
        lambda *_: seen.append(first_output(clip, clip_inputs))
    )
    first_output(model, inputs)
    assert torch.equal(seen[0], plain)
    assert F.scaled_dot_product_attention is sdpa
    assert LlamaForCausalLM.forward is forward
    assert {k: AttentionInterface._global_mapping[k] for k in known} == known


# Other models


def test_other_models_are_not_touched() -> None:
    # case 34
    first, inputs = tiny_llama()
    second, _ = tiny_llama()
    plain = first_output(second, inputs)
    patch = _patch(first)
    third, _ = tiny_llama()
    assert torch.equal(first_output(second, inputs), plain)
    assert torch.equal(first_output(third, inputs), plain)
    assert second.config._attn_implementation == "sdpa"
    assert patch.layers[0].record.calls == 0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_two_models_with_one_config(implementation: str) -> None:
    # case 34: the second model's modules carry no handle, so they run what they ran before
    first, inputs = tiny_llama(attn_implementation=implementation)
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    second.config = second.model.config = first.config
    for layer in second.model.layers:
        layer.self_attn.config = first.config
    plain = first_output(second, inputs)
    patch = _patch(first)
    assert torch.equal(first_output(second, inputs), plain)
    assert _quantised(patch) == 0
    other = _patch(second)
    patch.restore()
    assert not torch.equal(first_output(second, inputs), plain)
    assert torch.equal(first_output(first, inputs), plain)
    other.restore()
    assert first.config._attn_implementation == implementation
    assert torch.equal(first_output(second, inputs), plain)


# The way back


def test_patching_twice_and_restoring_once() -> None:
    # case 33
    model, inputs = tiny_llama()
    plain = first_output(model, inputs)
    first = _patch(model)
    second = _patch(model)
    first_output(model, inputs)
    assert (_quantised(first), _quantised(second)) == (0, 3)
    sagepatch.restore(model)
    assert torch.equal(first_output(model, inputs), plain)
    second.restore()
    first.restore()
    assert model.config._attn_implementation == "sdpa"


def test_an_error_in_the_middle_of_a_forward() -> None:
    # case 33
    model, inputs = tiny_llama()
    plain = first_output(model, inputs)

    def fail(*_: Any) -> None:
        raise MemoryError("as if the GPU were full")

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(MemoryError), _patch(model):
        first_output(model, inputs)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(first_output(model, inputs), plain)


def test_a_newer_choice_of_the_user_stays() -> None:
    # case 36
    model, inputs = tiny_llama()
    patch = _patch(model)
    model.set_attn_implementation("eager")
    first_output(model, inputs)
    assert _quantised(patch) == 0
    assert {swap.replaced_by() for swap in patch._swaps} == {"eager"}
    patch.restore()
    assert model.config._attn_implementation == "eager"
    with _patch(model) as again:
        first_output(model, inputs)
        assert _quantised(again) == 3
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_moved_and_cast_after_patching(dtype: torch.dtype) -> None:
    # case 48: nothing was decided by where the model was when it was patched
    model, inputs = tiny_llama()
    plain = first_output(model.to(dtype), inputs)
    model.float()
    patch = _patch(model)
    out = first_output(model.to(dtype), inputs)
    assert out.dtype == dtype
    assert (out - plain).norm() < 0.15 * plain.norm()
    assert _quantised(patch) == 3


def test_under_accelerate_hooks() -> None:
    model, inputs = tiny_llama()
    plain = first_output(model, inputs)
    patch = _patch(model)
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook())
    first_output(model, inputs)
    assert _quantised(patch) == 3
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(first_output(model, inputs), plain)


# Threads


def test_threads_do_not_mix() -> None:
    # case 50
    model, _ = tiny_llama()
    _patch(model)
    other, inputs = tiny_bert()
    prompts = [{"input_ids": ids(1, 9 + i, seed=i)} for i in range(8)]
    alone = [first_output(model, prompt) for prompt in prompts]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            if not torch.equal(first_output(model, prompts[i]), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with _patch(other):
            first_output(other, inputs)
    for thread in threads:
        thread.join()
    assert not wrong
