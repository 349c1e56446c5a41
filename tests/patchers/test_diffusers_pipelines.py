"""Whole pipelines: only the denoiser changes, whatever offloading or casting is switched on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.diffusers_models import (
    forward,
    tiny_flux,
    tiny_flux_pipeline,
    tiny_sdxl_pipeline,
    tiny_wan_pipeline,
)
from models.patching import patch_all
from numpy.typing import NDArray

import sagepatch

CALLS: dict[str, tuple[Callable[[], Any], str, dict[str, Any], int]] = {
    # builder, denoiser, call arguments, layers
    "flux": (
        tiny_flux_pipeline,
        "transformer",
        {"height": 16, "width": 16, "guidance_scale": 0.0, "max_sequence_length": 16},
        4,
    ),
    "sdxl": (tiny_sdxl_pipeline, "unet", {"height": 32, "width": 32}, 16),
    "wan": (
        tiny_wan_pipeline,
        "transformer",
        {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16},
        4,
    ),
}


def picture(pipe: Any, options: dict[str, Any]) -> NDArray[np.float32]:
    generator = torch.Generator().manual_seed(0)
    out = pipe(
        "a red apple", num_inference_steps=2, output_type="np", generator=generator, **options
    )
    return np.asarray(out[0])


@pytest.mark.parametrize("name", CALLS)
def test_pipeline_draws_the_same_picture_and_comes_back(name: str) -> None:
    build, denoiser, options, layers = CALLS[name]
    pipe = build()
    reference = picture(pipe, options)
    patch = sagepatch.apply(pipe, variant="emulated.sage2_8", emulate=True)
    out = picture(pipe, options)
    assert [layer.name.partition(".")[0] for layer in patch.layers] == [denoiser] * layers
    assert all(layer.record.by_variant["emulated.sage2_8"] > 0 for layer in patch.layers)
    assert not patch.left
    assert 0 < np.abs(out - reference).max() < 0.1
    patch.restore()
    assert np.array_equal(picture(pipe, options), reference)


def test_saved_pipeline_is_that_of_an_unpatched_save(tmp_path: Path) -> None:  # case 40
    pipe = tiny_flux_pipeline()
    pipe.save_pretrained(tmp_path / "plain")
    with sagepatch.apply(pipe, variant="emulated.sage2_8", emulate=True):
        pipe.save_pretrained(tmp_path / "patched")
    files = [
        p.relative_to(tmp_path / "plain") for p in (tmp_path / "plain").rglob("*") if p.is_file()
    ]
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (
            tmp_path / "patched" / file
        ).read_bytes()


def test_vae_with_processors_only_when_named() -> None:  # case 37
    pipe = tiny_flux_pipeline()
    with sagepatch.apply(
        pipe, variant="emulated.sage2_8", emulate=True, components=["vae"]
    ) as patch:
        assert {layer.name.partition(".")[0] for layer in patch.layers} == {"vae"}
        picture(pipe, CALLS["flux"][2])
        counted = [layer for layer in patch.layers if layer.record.calls]
    assert [layer.name for layer in counted] == ["vae.decoder.mid_block.attentions.0"]


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize("manner", ["accelerate", "layerwise casting"])
def test_hooks_of_offloading_and_casting(manner: str, order: str) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    def switch_on() -> None:
        if manner == "accelerate":
            for block in model.transformer_blocks:
                add_hook_to_module(block.attn, AlignDevicesHook(execution_device="cpu"))
        else:
            model.enable_layerwise_casting(torch.bfloat16, torch.float32)

    model, inputs = tiny_flux()
    if order == "before the patch":
        switch_on()
    patched = patch_all(model, "emulated.sage1_b_f32")
    if order == "after the patch":
        switch_on()
    out = forward(model, inputs)
    assert patched.calls() == [1] * 4
    assert not patched.replaced()
    patched.restore()
    reference = forward(model, inputs)
    assert 0 < ((out - reference).norm() / reference.norm()).item() < 0.01
    assert patched.calls() == [1] * 4
    if manner == "accelerate":
        for block in model.transformer_blocks:
            remove_hook_from_module(block.attn)
        torch.testing.assert_close(forward(model, inputs), reference)


def test_compiled_wrappers_are_no_part_of_names_or_fingerprint() -> None:
    pipe = tiny_flux_pipeline()
    with sagepatch.apply(pipe, variant="emulated.sage2_8", emulate=True) as patch:
        plan, names = patch.plan(), [layer.name for layer in patch.layers]
    pipe.transformer.transformer_blocks[0] = torch.compile(
        pipe.transformer.transformer_blocks[0], backend="eager"
    )
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    reference = picture(pipe, CALLS["flux"][2])
    with sagepatch.apply(pipe, plan=plan) as patch:
        assert [layer.name for layer in patch.layers] == names
        picture(pipe, CALLS["flux"][2])
        assert all(layer.record.by_variant["emulated.sage2_8"] == 2 for layer in patch.layers)
    assert np.array_equal(picture(pipe, CALLS["flux"][2]), reference)
