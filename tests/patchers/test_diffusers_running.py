"""Patched diffusers models at work: other processors, guidance, training, threads, faults."""

from __future__ import annotations

import functools
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from diffusers import AutoencoderKL, LayerSkipConfig
from diffusers.hooks import HookRegistry
from diffusers.hooks.layer_skip import apply_layer_skip
from diffusers.models.attention_processor import Attention, IPAdapterAttnProcessor2_0
from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioAttnBlock1D
from diffusers.models.transformers.ace_step_transformer import (
    AceStepAttention,
    _is_flash_attention_backend,
)
from diffusers.models.transformers.transformer_flux import (
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from models.diffusers_models import BUILDERS, forward, tiny_flux, tiny_sd3, tiny_unet, tiny_wan
from models.patching import patch_all
from torch import Tensor, nn

from sagepatch import ops
from sagepatch.errors import StrictFallback
from sagepatch.layer import Policy
from sagepatch.patchers.sdpa_redirect import OBSERVED, TRAINING
from sagepatch.spec import Call
from sagepatch.variant import Variant

VARIANT = "emulated.sage2_8"


def relative(out: Tensor, reference: Tensor) -> float:
    return ((out - reference).norm() / reference.norm()).item()


def test_processor_with_weights_stays_a_submodule() -> None:
    torch.manual_seed(0)
    attention = Attention(32, cross_attention_dim=24, heads=2, dim_head=16)
    attention.set_processor(IPAdapterAttnProcessor2_0(32, cross_attention_dim=24, num_tokens=(4,)))
    model = nn.ModuleDict({"attn2": attention}).eval()
    states = torch.randn(1, 30, 32)
    text = (torch.randn(1, 7, 24), [torch.randn(1, 1, 4, 24)])
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    original = attention.processor
    with torch.no_grad():
        reference = attention(states, encoder_hidden_states=text)
        with patch_all(model, "emulated.sage1_b_f32") as patched:
            out = attention(states, encoder_hidden_states=text)
            assert patched.calls() == [2]  # text, then image
            assert list(model.state_dict()) == keys
            assert [name for name, _ in model.named_modules()] == names
            attention.processor.scale = [0.5]  # as set_ip_adapter_scale does
            model.double().float()
            half = attention(states, encoder_hidden_states=text)
        assert attention.processor is original
        assert original.scale == [0.5]
        after = attention(states, encoder_hidden_states=text)
    assert 0 < relative(out, reference) < 0.01
    assert 0 < relative(half, after) < 0.01
    assert relative(half, reference) > 5 * relative(half, after)
    assert list(model.state_dict()) == keys


def test_flux_ip_adapter() -> None:
    model, inputs = tiny_flux(double=1, single=1)
    torch.manual_seed(0)
    adapter = FluxIPAdapterAttnProcessor(64, cross_attention_dim=16, num_tokens=(4,))
    model.transformer_blocks[0].attn.set_processor(adapter)
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(1, 4, 16)]}
    reference = forward(model, inputs)
    with patch_all(model, "emulated.sage1_b_f32") as patched:
        out = forward(model, inputs)
    assert patched.calls() == [2, 1]
    assert 0 < relative(out, reference) < 0.01
    assert model.transformer_blocks[0].attn.processor is adapter
    assert torch.equal(forward(model, inputs), reference)


def test_adapter_loaded_after_the_patch_is_reported() -> None:  # case 36
    model, _ = tiny_flux(double=1, single=1)
    patched = patch_all(model, VARIANT)
    model.transformer_blocks[0].attn.set_processor(
        FluxIPAdapterAttnProcessor(64, cross_attention_dim=16)
    )
    assert patched.replaced() == {"FluxIPAdapterAttnProcessor"}
    patched.restore()
    assert type(model.transformer_blocks[0].attn.processor) is FluxIPAdapterAttnProcessor
    assert type(model.single_transformer_blocks[0].attn.processor) is FluxAttnProcessor


def test_model_that_reads_the_backend_of_its_processor() -> None:
    torch.manual_seed(0)
    attention = AceStepAttention(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    model = nn.ModuleDict({"self_attn": attention}).eval()
    states = torch.randn(2, 19, 32)
    with torch.no_grad():
        reference = attention(states)
        # AceStep repeats no heads: torch's SDPA is called with shared key heads.
        with patch_all(model, VARIANT) as patched:
            assert _is_flash_attention_backend(attention.processor) is False
            out = attention(states)
    assert patched.ran() == {VARIANT: 1}
    assert 0 < relative(out, reference) < 0.05


def test_dispatcher_call_without_a_backend() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": MMAudioAttnBlock1D(16)}).eval()
    signal = torch.randn(1, 16, 21)
    with torch.no_grad():
        reference = model["block"](signal)
        with patch_all(model, VARIANT) as patched:
            out = model["block"](signal)
    assert patched.ran() == {VARIANT: 1}
    assert 0 < relative(out, reference) < 0.05


class Layer(nn.Module):
    """Somebody's own attention module in diffusers' manner."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return self.processor(self, q, k, v, **options)


class Passing:
    """Hands its arguments to SDPA as they come, positional or by keyword."""

    def __call__(self, attn: Layer, *args: Any, **kwargs: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)


def test_call_forms_of_sdpa() -> None:  # case 49
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Layer(Passing())})
    layer = model["a"]
    q, k, v = torch.randn(3, 2, 4, 9, 16).unbind(0)
    keep = torch.rand(9, 9) > 0.3
    keep[:, 0] = True
    plain = torch.nn.functional.scaled_dot_product_attention
    with patch_all(model, "sdpa.exact") as patched:
        torch.testing.assert_close(layer(q, k, v, attn_mask=keep), plain(q, k, v, keep))
        torch.testing.assert_close(
            layer.processor(layer, query=q, key=k, value=v, is_causal=True),
            plain(q, k, v, is_causal=True),
        )
        torch.testing.assert_close(
            layer.processor(layer, q, k, v, keep, 0.0, False, scale=0.3),
            plain(q, k, v, keep, scale=0.3),
        )
        assert patched.calls() == [3]
        assert not patched.fallbacks()
        torch.testing.assert_close(layer(q[0], k[0], v[0]), plain(q[0], k[0], v[0]))
        with pytest.raises(TypeError, match="layout"):
            layer(q, k, v, layout="HND")
        both = {"attn_mask": keep, "is_causal": True}
        # torch 2.14 refuses what older ones computed; a patched layer does as torch does.
        try:
            expected = plain(q, k, v, **both)
        except RuntimeError as refused:
            with pytest.raises(RuntimeError, match=re.escape(str(refused))):
                layer(q, k, v, **both)
        else:
            torch.testing.assert_close(layer(q, k, v, **both), expected)
        with pytest.raises(RuntimeError):
            layer(q, k[:, :3], v)
    assert sum(patched.fallbacks().values()) == 3


@pytest.mark.parametrize("order", ["patched last", "patched first"])
@pytest.mark.parametrize("family", ["qwen_image", "pixart"])
def test_guidance_by_skipped_scores_sees_the_call(family: str, order: str) -> None:
    model, inputs = BUILDERS[family]()
    plain = forward(model, inputs)

    def skip_scores_of_block_1() -> None:
        config = LayerSkipConfig([1], "transformer_blocks", False, True, False)
        apply_layer_skip(model, config)

    patched = patch_all(model, "emulated.sage1_b_f32") if order == "patched first" else None
    skip_scores_of_block_1()
    if patched is None:
        patched = patch_all(model, "emulated.sage1_b_f32")
    out = forward(model, inputs)
    patched.restore()
    reference = forward(model, inputs)
    assert relative(reference, plain) > 1e-3
    # Block 1 does what the guidance wants; the others run the kernel.
    assert 0 < relative(out, reference) < 0.3 * relative(reference, plain)
    assert set(patched.fallbacks()) == {OBSERVED}
    skipped = {name for name, layer in patched.layers.items() if layer.record.fallbacks}
    assert skipped
    assert all(name.startswith("transformer_blocks.1.") for name in skipped)
    assert sum(patched.ran().values()) == len(patched.layers)


def test_guidance_by_skipped_layers_is_untouched() -> None:
    model, inputs = tiny_flux()
    apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn="transformer_blocks"))
    with patch_all(model, VARIANT) as patched:
        forward(model, inputs)
        assert patched.calls() == [0, 1, 1, 1]
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        assert registry is None or isinstance(registry, HookRegistry)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_lora_gradients_are_those_of_the_unpatched_model(family: str) -> None:  # case 46
    from peft import LoraConfig

    model, inputs = BUILDERS[family]()
    model.requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().mean().backward()
        return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}

    expected = gradients()
    with patch_all(model, VARIANT) as patched:
        found = gradients()
        assert patched.fallbacks() == {TRAINING: len(patched.layers)}
        forward(model, inputs)  # no_grad: the kernel again
        assert patched.ran()[VARIANT] == len(patched.layers)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)
        assert gradient.abs().sum() > 0


def test_gradient_checkpointing_trains() -> None:  # case 46
    model, inputs = tiny_flux()
    model.enable_gradient_checkpointing()
    model.train()
    with patch_all(model, VARIANT):
        model(**inputs, return_dict=False)[0].sum().backward()
        assert model.transformer_blocks[0].attn.to_q.weight.grad is not None


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_reentrant_checkpoint_runs_one_forward_twice(family: str) -> None:  # case 46
    # Its first forward is without gradients: quantised, it would not be the one that the backward
    # differentiates.
    def step(patched: bool) -> list[Tensor]:
        model, inputs = BUILDERS[family]()
        model.train()
        model.enable_gradient_checkpointing(
            functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        )
        patch = patch_all(model, VARIANT) if patched else None
        out = model(**inputs, return_dict=False)[0]
        out.pow(2).mean().backward()
        if patch is not None:
            assert set(patch.fallbacks()) == {TRAINING}
            assert patch.ran() == {"sdpa.exact": sum(patch.calls())}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [out.detach(), *gradients]

    assert all(map(torch.equal, step(True), step(False)))


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_threads_get_what_they_get_alone(family: str) -> None:  # case 50
    model, inputs = BUILDERS[family]()
    other, other_inputs = tiny_wan()
    other_reference = forward(other, other_inputs)
    jobs = [
        {**inputs, "hidden_states": inputs["hidden_states"] * (1 + 0.1 * number)}
        for number in range(8)
    ]
    with patch_all(model, VARIANT) as patched:
        serial = [forward(model, job) for job in jobs]

        def rounds(number: int) -> bool:
            return all(torch.equal(forward(model, jobs[number]), serial[number]) for _ in range(6))

        def meanwhile() -> bool:
            for _ in range(6):
                with patch_all(other, VARIANT):
                    forward(other, other_inputs)
                if not torch.equal(forward(other, other_inputs), other_reference):
                    return False
            return True

        with ThreadPoolExecutor(9) as pool:
            busy = pool.submit(meanwhile)
            assert all(pool.map(rounds, range(8)))
            assert busy.result()
        assert not patched.replaced()


def test_error_at_launch_names_the_site(monkeypatch: pytest.MonkeyPatch) -> None:  # case 47
    model, inputs = tiny_sd3()
    calls = 0
    genuine = ops.run_variant

    def fail_at_third(variant: Variant, call: Call) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no kernel image")
        return genuine(variant, call)

    reference = forward(model, inputs)
    with patch_all(model, VARIANT):
        monkeypatch.setattr(ops, "run_variant", fail_at_third)
        with pytest.raises(RuntimeError, match="no kernel image") as caught:
            forward(model, inputs)
        assert any("transformer_blocks.2.attn" in note for note in caught.value.__notes__)
        monkeypatch.undo()
        assert relative(forward(model, inputs), reference) < 0.01
    assert torch.equal(forward(model, inputs), reference)


def test_non_finite_output_is_recomputed_and_the_site_demoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # case 47
    model, inputs = tiny_flux()
    reference = forward(model, inputs)
    genuine = ops.run_variant
    calls = 0

    def not_a_number_at_second(variant: Variant, call: Call) -> Any:
        nonlocal calls
        calls += 1
        out, lse = genuine(variant, call)
        return (torch.full_like(out, float("nan")) if calls == 2 else out), lse

    with patch_all(model, VARIANT) as patched, caplog.at_level(logging.WARNING, "sagepatch"):
        monkeypatch.setattr(ops, "run_variant", not_a_number_at_second)
        outs = [forward(model, inputs) for _ in range(3)]
        assert all(relative(out, reference) < 0.01 for out in outs)
        demoted = [name for name, layer in patched.layers.items() if layer.demoted]
    assert demoted == ["transformer_blocks.1.attn"]
    assert len([r for r in caplog.records if "transformer_blocks.1.attn" in r.getMessage()]) == 1


def test_head_size_that_no_kernel_has_runs_exact_with_the_reason() -> None:  # case 5
    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(64, 512),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    ).eval()
    picture = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        reference = model(picture).sample
        with patch_all(model, "triton.sage2_8") as patched:
            out = model(picture).sample
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-4)
    assert patched.ran() == {"sdpa.exact": 2}
    (reason,) = patched.fallbacks()
    assert "head_dim is 512, needs" in reason


def test_strict_raises_where_a_layer_would_fall_back() -> None:  # case 47
    model, inputs = tiny_unet()
    with (
        patch_all(model, "triton.sage2_8", policy=Policy(strict=True)),
        pytest.raises(StrictFallback, match=r"down_blocks\.0"),
    ):
        forward(model, inputs)
    forward(model, inputs)
