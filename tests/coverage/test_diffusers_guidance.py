"""ControlNets, T2I-Adapters, guidance that borrows or skips layers, slicing and xformers on patched
pipelines: the picture is that of the unpatched pipeline, and the report tells who took a layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import LayerSkipConfig, SmoothedEnergyGuidanceConfig
from diffusers.hooks.layer_skip import apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import _apply_smoothed_energy_guidance_hook
from diffusers.models import attention_processor
from diffusers_families import FAMILIES
from diffusers_family import Family, forward, noise
from diffusers_rows import EXACT, FAST
from models.diffusers_models import tiny_flux_pipeline, tiny_sdxl_pipeline
from numpy.typing import NDArray
from torch import Tensor

import sagepatch
from sagepatch import Patch
from sagepatch.errors import NothingPatched

BY_NAME = {family.name: family for family in FAMILIES}
HINT = noise(1, 3, 32, 32, seed=4).clamp(0, 1)


def draw(pipe: Any, **options: Any) -> NDArray[np.float32]:
    sizes = {"height": 32, "width": 32} | options
    generator = torch.Generator().manual_seed(0)
    out = pipe("a red apple", num_inference_steps=2, output_type="np", generator=generator, **sizes)
    return np.asarray(out[0])


def calls(patch: Patch) -> dict[str, int]:
    return {layer.name: layer.record.calls for layer in patch.layers}


def printed(patch: Patch) -> str:
    """The report in one line, however wide the terminal."""
    return " ".join(str(patch.report()).split())


def controlnet(seed: int) -> Any:
    torch.manual_seed(seed)
    made = diffusers.ControlNetModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=64,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        conditioning_embedding_out_channels=(8, 8),
    )
    for parameter in made.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


def sdxl_controlnet() -> Any:
    return quiet(
        diffusers.StableDiffusionXLControlNetPipeline.from_pipe(
            tiny_sdxl_pipeline(), controlnet=controlnet(1)
        )
    )


def sdxl_controlnets() -> Any:
    both = diffusers.MultiControlNetModel([controlnet(1), controlnet(2)])
    return quiet(
        diffusers.StableDiffusionXLControlNetPipeline.from_pipe(
            tiny_sdxl_pipeline(), controlnet=both
        )
    )


def flux_controlnet() -> Any:
    pipe = tiny_flux_pipeline()
    made = diffusers.FluxControlNetModel.from_transformer(
        pipe.transformer,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
    )
    return quiet(diffusers.FluxControlNetPipeline.from_pipe(pipe, controlnet=made.eval()))


def sdxl_t2i() -> Any:
    torch.manual_seed(1)
    adapter = diffusers.T2IAdapter(
        in_channels=3,
        channels=[32, 64],
        num_res_blocks=1,
        downscale_factor=4,
        adapter_type="full_adapter_xl",
    )
    return quiet(
        diffusers.StableDiffusionXLAdapterPipeline.from_pipe(
            tiny_sdxl_pipeline(), adapter=adapter.eval()
        )
    )


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


WITH_HINTS: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    # pipeline, what its call takes besides, parts that are patched
    "controlnet": (sdxl_controlnet, {"image": HINT}, {"unet", "controlnet"}),
    "two controlnets": (
        sdxl_controlnets,
        {"image": [HINT, HINT], "controlnet_conditioning_scale": [0.8, 0.4]},
        {"unet", "controlnet"},
    ),
    "flux controlnet": (
        flux_controlnet,
        {"control_image": HINT, "max_sequence_length": 16, "guidance_scale": 0.0},
        {"transformer", "controlnet"},
    ),
    "t2i adapter": (sdxl_t2i, {"image": HINT}, {"unet"}),
}


@pytest.mark.parametrize("name", WITH_HINTS)
def test_pipelines_with_hints(name: str) -> None:
    build, options, parts = WITH_HINTS[name]
    pipe = build()
    reference = draw(pipe, **options)
    with sagepatch.apply(pipe, variant=EXACT) as patch:
        assert np.array_equal(draw(pipe, **options), reference)
        assert {site.partition(".")[0] for site in calls(patch)} == parts
        assert 0 not in calls(patch).values()
        assert not patch.left
    with sagepatch.apply(pipe, variant=FAST, emulate=True):
        close = draw(pipe, **options)
    assert 0 < np.abs(close - reference).max() < 0.1
    assert np.array_equal(draw(pipe, **options), reference)


def test_controlnet_added_after_the_patch_is_found_by_the_next() -> None:
    pipe = tiny_sdxl_pipeline()
    patch = sagepatch.apply(pipe, variant=EXACT)
    more = diffusers.StableDiffusionXLControlNetPipeline.from_pipe(pipe, controlnet=controlnet(1))
    draw(quiet(more), image=HINT)
    assert 0 not in calls(patch).values()  # the UNet is the same, and patched
    again = sagepatch.apply(more, variant=EXACT)
    assert any(name.startswith("controlnet.") for name in calls(again))
    again.restore()
    assert patch.restored


@pytest.mark.parametrize("scale", [0.0, 3.0], ids=["off", "on"])
def test_perturbed_attention_guidance(scale: float) -> None:  # case 36
    """The pipeline borrows its layers for the length of a call, and gives them back."""
    build = diffusers.StableDiffusionXLPAGPipeline.from_pipe
    pipe = quiet(build(tiny_sdxl_pipeline(), pag_applied_layers=["mid"]))
    reference = draw(pipe, pag_scale=scale)
    patch = sagepatch.apply(pipe, variant=EXACT)
    assert np.allclose(draw(pipe, pag_scale=scale), reference, atol=1e-5)
    assert not patch.replaced()
    borrowed = {name for name, count in calls(patch).items() if count == 0}
    assert all("mid_block" in name and name.endswith("attn1") for name in borrowed)
    assert bool(borrowed) == (scale > 0)
    counted = calls(patch)
    draw(pipe, pag_scale=0.0)
    assert all(now > counted[name] for name, now in calls(patch).items())
    patch.restore()
    assert np.array_equal(draw(pipe, pag_scale=scale), reference)


def test_perturbed_layers_that_stay_are_reported() -> None:  # case 36
    pipe = quiet(
        diffusers.StableDiffusionXLPAGPipeline.from_pipe(
            tiny_sdxl_pipeline(), pag_applied_layers=["mid"]
        )
    )
    patch = sagepatch.apply(pipe, variant=EXACT)
    pipe._set_pag_attn_processor(["mid"], True)  # a call that an error ended would leave this
    assert set(patch.replaced().values()) == {"PAGCFGIdentitySelfAttnProcessor2_0"}
    assert "no longer patched: replaced by PAGCFG" in printed(patch)
    patch.restore()
    left = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor
    assert type(left).__name__ == "PAGCFGIdentitySelfAttnProcessor2_0"


def skip_whole_layers(model: Any, where: str) -> None:
    apply_layer_skip(model, LayerSkipConfig([1], where))


def skip_attention(model: Any, where: str) -> None:
    apply_layer_skip(model, LayerSkipConfig([1], where, True, False, False))


def skip_scores(model: Any, where: str) -> None:
    apply_layer_skip(model, LayerSkipConfig([1], where, False, True, False))


def blur_queries(model: Any, where: str) -> None:
    config = SmoothedEnergyGuidanceConfig([1], where)
    _apply_smoothed_energy_guidance_hook(model, config, blur_sigma=1.0)


GUIDANCE: dict[str, Callable[[Any, str], None]] = {
    "whole layers": skip_whole_layers,
    "attention": skip_attention,
    "scores": skip_scores,
    "blurred queries": blur_queries,
}
# Where diffusers' own hooks work on the unpatched model and change its output.
GUIDED = [
    ("FLUX.2", "transformer_blocks", "whole layers"),
    ("PixArt", "transformer_blocks", "whole layers"),
    ("CogVideoX 2B", "transformer_blocks", "whole layers"),
    ("Wan 2.1 / 2.2, text to video", "blocks", "whole layers"),
    ("Mochi", "transformer_blocks", "whole layers"),
    ("Z-Image", "layers", "attention"),
    ("CogView4", "transformer_blocks", "attention"),
    ("PixArt", "transformer_blocks", "attention"),
    ("Z-Image", "layers", "scores"),
    ("CogView4", "transformer_blocks", "scores"),
    ("PixArt", "transformer_blocks", "scores"),
    ("Qwen-Image", "transformer_blocks", "scores"),
    ("PixArt", "transformer_blocks", "blurred queries"),
    ("Qwen-Image", "transformer_blocks", "blurred queries"),
    ("SD 3 / 3.5", "transformer_blocks", "blurred queries"),
]


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize(("family", "where", "what"), GUIDED)
def test_guidance_by_hooks(family: str, where: str, what: str, order: str) -> None:
    made: Family = BY_NAME[family]
    model, twin = made.built(), made.built()

    def run(each: Any) -> Tensor:
        return forward(each, made.inputs(each.config, made.small))

    plain = run(twin)
    GUIDANCE[what](twin, where)
    expected = run(twin)
    assert not torch.allclose(plain, expected, atol=1e-3)
    if order == "before the patch":
        GUIDANCE[what](model, where)
    patch = sagepatch.apply(model, variant=EXACT)
    if order == "after the patch":
        GUIDANCE[what](model, where)
    assert torch.equal(run(model), expected)
    assert not patch.replaced()
    skipped = {name for name, count in calls(patch).items() if count == 0}
    assert all(name.startswith(f"{where}.1.") for name in skipped)
    assert bool(skipped) == (what in ("whole layers", "attention"))
    patch.restore()
    assert torch.equal(run(model), expected)


def test_skipped_layers_of_sd3() -> None:
    made = BY_NAME["SD 3 / 3.5"]
    model = made.built()
    given = made.inputs(model.config, made.small) | {"skip_layers": [1]}
    reference = forward(model, given)
    with sagepatch.apply(model, variant=EXACT) as patch:
        assert torch.equal(forward(model, given), reference)
        assert [n for n, count in calls(patch).items() if not count] == [
            "transformer_blocks.1.attn"
        ]


@pytest.mark.parametrize("mask", [None, torch.tensor([0.0, 1.0])], ids=["all", "one sample"])
def test_spatio_temporal_guidance_of_ltx2(mask: Tensor | None) -> None:
    made = BY_NAME["LTX-2"]
    model = diffusers.LTX2VideoTransformer3DModel(**made.tiny, perturbed_attn=True).eval()
    given = made.inputs(model.config, made.small) | {"spatio_temporal_guidance_blocks": [1]}
    if mask is not None:
        given["perturbation_mask"] = mask
    plain = forward(model, made.inputs(model.config, made.small))
    reference = forward(model, given)
    assert not torch.allclose(plain, reference)
    with sagepatch.apply(model, variant=EXACT) as patch:
        assert torch.equal(forward(model, given), reference)
        uncalled = {name for name, count in calls(patch).items() if not count}
    # Where all samples are perturbed a layer hands its values on, without attention.
    own = {"transformer_blocks.1.attn1", "transformer_blocks.1.audio_attn1"}
    assert uncalled == (own if mask is None else set())


def test_attention_slicing_of_a_pipeline() -> None:  # case 36
    pipe = tiny_sdxl_pipeline()
    reference = draw(pipe)
    patch = sagepatch.apply(pipe, variant=EXACT)
    pipe.enable_attention_slicing("max")
    assert np.allclose(draw(pipe), reference, atol=1e-4)
    assert "no longer patched: replaced by SlicedAttnProcessor" in printed(patch)
    with pytest.raises(NothingPatched, match="SlicedAttnProcessor computes its scores by hand"):
        sagepatch.apply(pipe, variant=EXACT)
    pipe.disable_attention_slicing()
    assert set(patch.replaced().values()) == {"AttnProcessor2_0"}
    with sagepatch.apply(pipe, variant=EXACT) as again:
        assert np.allclose(draw(pipe), reference, atol=1e-5)
        assert 0 not in calls(again).values()
    assert np.allclose(draw(pipe), reference, atol=1e-5)


def test_xformers_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:  # case 36
    """Its switch wants a GPU; what it sets and what the switch off sets is the same here."""

    def efficient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        mask = options.get("attn_bias")
        return F.scaled_dot_product_attention(q, k, v, mask, scale=options.get("scale"))

    fake = types.SimpleNamespace(ops=types.SimpleNamespace(memory_efficient_attention=efficient))
    monkeypatch.setattr(attention_processor, "xformers", fake, raising=False)
    pipe = tiny_sdxl_pipeline()
    reference = draw(pipe)
    patch = sagepatch.apply(pipe, variant=EXACT)
    pipe.unet.set_attn_processor(attention_processor.XFormersAttnProcessor())
    assert np.allclose(draw(pipe), reference, atol=1e-4)
    assert set(patch.replaced().values()) == {"XFormersAttnProcessor"}
    assert "no longer patched: replaced by XFormersAttnProcessor" in printed(patch)
    with pytest.raises(NothingPatched, match="switch that off"):
        sagepatch.apply(pipe, variant=EXACT)
    pipe.disable_xformers_memory_efficient_attention()
    assert set(patch.replaced().values()) == {"AttnProcessor2_0"}
    with sagepatch.apply(pipe, variant=EXACT) as again:
        assert np.allclose(draw(pipe), reference, atol=1e-5)
        assert 0 not in calls(again).values()


def test_switching_xformers_off_where_it_was_never_on_leaves_the_patch_or_says_so() -> None:
    pipe = tiny_sdxl_pipeline()
    patch = sagepatch.apply(pipe, variant=EXACT)
    pipe.disable_xformers_memory_efficient_attention()
    draw(pipe)
    idle = {name for name, count in calls(patch).items() if count == 0}
    assert idle == patch.replaced().keys()


def test_two_experts_of_one_pipeline() -> None:
    from models.diffusers_models import tiny_wan_pipeline

    pipe = tiny_wan_pipeline()
    other = tiny_wan_pipeline().transformer
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    pipe.register_modules(transformer_2=other)
    pipe.register_to_config(boundary_ratio=0.5)
    options = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
    reference = draw(pipe, **options)
    with sagepatch.apply(pipe, variant=EXACT) as patch:
        assert np.array_equal(draw(pipe, **options), reference)
        counted = calls(patch)
    assert {name.partition(".")[0] for name in counted} == {"transformer", "transformer_2"}
    assert 0 not in counted.values()
