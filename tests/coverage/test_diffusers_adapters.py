"""Image adapters on patched diffusers models, in both orders: the result is that of the unpatched
model, the report tells which layers were taken, patching again repairs, unloading too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import CustomDiffusionAttnProcessor2_0
from diffusers_families import FAMILIES
from diffusers_family import Family, forward, noise
from diffusers_rows import EXACT, FAST
from models.diffusers_models import tiny_sdxl_pipeline
from numpy.typing import NDArray
from torch import Tensor, nn

import sagepatch
from sagepatch import Patch

BY_NAME = {family.name: family for family in FAMILIES}
TOKENS, WIDTH = 4, 32  # of a picture, as the adapter sees it


def image_projection(width: int) -> dict[str, Tensor]:
    return {
        "proj.weight": noise(width * TOKENS, WIDTH, seed=5) / WIDTH**0.5,
        "proj.bias": noise(width * TOKENS, seed=6),
        "norm.weight": torch.ones(width),
        "norm.bias": torch.zeros(width),
    }


def unet_adapter(unet: Any) -> dict[str, dict[str, Tensor]]:
    """An IP-Adapter for a UNet, as its file holds it: keys and values for each cross-attention."""
    width = unet.config.cross_attention_dim
    # The file counts processors in the order of `attn_processors`.
    names = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    modules = [unet.get_submodule(name.removesuffix(".processor")) for name in names]
    layers: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        rows = module.to_k.out_features
        for kind, seed in (("k", 7), ("v", 8)):
            key = f"{2 * number + 1}.to_{kind}_ip.weight"
            layers[key] = noise(rows, width, seed=seed + number) / width**0.5
    return {"image_proj": image_projection(width), "ip_adapter": layers}


def flux_adapter(transformer: Any) -> dict[str, dict[str, Tensor]]:
    """An IP-Adapter for FLUX: keys and values, with biases, for each double block."""
    width, rows = transformer.config.joint_attention_dim, transformer.inner_dim
    layers: dict[str, Tensor] = {}
    for number in range(len(transformer.transformer_blocks)):
        for kind, seed in (("k", 7), ("v", 8)):
            key = f"{number}.to_{kind}_ip"
            layers[f"{key}.weight"] = noise(rows, width, seed=seed + number) / width**0.5
            layers[f"{key}.bias"] = noise(rows, seed=seed)
    return {"image_proj": image_projection(width), "ip_adapter": layers}


def draw(pipe: Any, **options: Any) -> NDArray[np.float32]:
    generator = torch.Generator().manual_seed(0)
    out = pipe(
        "a red apple",
        num_inference_steps=2,
        output_type="np",
        generator=generator,
        height=32,
        width=32,
        **options,
    )
    return np.asarray(out[0])


PICTURE = {"ip_adapter_image_embeds": [noise(2, 1, WIDTH, seed=9)]}


def load(pipe: Any) -> None:
    pipe.load_ip_adapter(
        unet_adapter(pipe.unet), subfolder="", weight_name="", image_encoder_folder=None
    )


def calls(patch: Patch) -> list[int]:
    return [layer.record.calls for layer in patch.layers]


def test_ip_adapter_loaded_before_the_patch() -> None:
    pipe = tiny_sdxl_pipeline()
    load(pipe)
    pipe.set_ip_adapter_scale(0.7)
    reference = draw(pipe, **PICTURE)
    patch = sagepatch.apply(pipe, variant=EXACT)
    assert np.array_equal(draw(pipe, **PICTURE), reference)
    assert 0 not in calls(patch)
    pipe.set_ip_adapter_scale(0.1)  # goes to our stand-ins, by their class
    weak = draw(pipe, **PICTURE)
    patch.restore()
    assert np.array_equal(draw(pipe, **PICTURE), weak)
    assert not np.allclose(weak, reference, atol=1e-4)
    with sagepatch.apply(pipe, variant=FAST, emulate=True):
        close = draw(pipe, **PICTURE)
    assert 0 < np.abs(close - weak).max() < 0.1


def test_ip_adapter_loaded_after_the_patch() -> None:  # case 36
    pipe, twin = tiny_sdxl_pipeline(), tiny_sdxl_pipeline()
    load(twin)
    reference = draw(twin, **PICTURE)
    patch = sagepatch.apply(pipe, variant=EXACT)
    load(pipe)
    assert np.allclose(draw(pipe, **PICTURE), reference, atol=1e-5)
    assert set(patch.replaced().values()) == {"IPAdapterAttnProcessor2_0", "AttnProcessor2_0"}
    assert len(patch.replaced()) == len(patch.layers)
    told = " ".join(str(patch.report()).split())
    assert "no longer patched: replaced by IPAdapterAttnProcessor2_0" in told
    assert set(calls(patch)) == {0}
    again = sagepatch.apply(pipe, variant=EXACT)
    assert np.array_equal(draw(pipe, **PICTURE), reference)
    assert not again.replaced()
    assert 0 not in calls(again)
    pipe.unload_ip_adapter()
    assert set(again.replaced().values()) == {"AttnProcessor2_0"}
    plain = draw(pipe)
    again.restore()
    assert np.array_equal(draw(pipe), plain)
    assert np.allclose(plain, draw(tiny_sdxl_pipeline()), atol=1e-5)


def test_state_dict_of_an_adapter_is_that_of_the_unpatched_model() -> None:
    pipe = tiny_sdxl_pipeline()
    load(pipe)
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}
    assert any("to_k_ip" in key for key in before)
    with sagepatch.apply(pipe, variant=FAST, emulate=True):
        now = pipe.unet.state_dict()
        assert list(now) == list(before)
        assert all(torch.equal(now[key], before[key]) for key in before)


def test_masks_of_an_adapter_reach_its_processors() -> None:
    """diffusers passes on what the signature of a processor names."""
    pipe = tiny_sdxl_pipeline()
    load(pipe)
    mask = torch.zeros(1, 1, 32, 32)
    mask[..., :16] = 1.0
    options = PICTURE | {"cross_attention_kwargs": {"ip_adapter_masks": [mask]}}
    reference, whole = draw(pipe, **options), draw(pipe, **PICTURE)
    assert not np.allclose(reference, whole, atol=1e-4)
    with sagepatch.apply(pipe, variant=EXACT):
        assert np.array_equal(draw(pipe, **options), reference)


def flux_inputs(family: Family, model: nn.Module) -> dict[str, Any]:
    picture = {"ip_adapter_image_embeds": [noise(1, 1, WIDTH, seed=9)]}
    return {**family.inputs(model.config, family.small), "joint_attention_kwargs": picture}


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
def test_flux_ip_adapter(order: str) -> None:  # case 36
    family = BY_NAME["FLUX.1"]
    model, twin = family.built(), family.built()
    for each in (model, twin):
        each.encoder_hid_proj = None
    twin._load_ip_adapter_weights(flux_adapter(twin))
    reference = forward(twin, flux_inputs(family, twin))
    if order == "before the patch":
        model._load_ip_adapter_weights(flux_adapter(model))
    patch = sagepatch.apply(model, variant=EXACT)
    if order == "after the patch":
        model._load_ip_adapter_weights(flux_adapter(model))
        assert set(patch.replaced().values()) == {"FluxIPAdapterAttnProcessor", "FluxAttnProcessor"}
        assert torch.equal(forward(model, flux_inputs(family, model)), reference)
        assert calls(patch) == [0, 0, 0, 0]
        patch = sagepatch.apply(model, variant=EXACT)
    assert torch.equal(forward(model, flux_inputs(family, model)), reference)
    assert calls(patch) == [2, 2, 1, 1]  # a second call of the double blocks, for the picture
    patch.restore()
    assert torch.equal(forward(model, flux_inputs(family, model)), reference)


CUSTOM: dict[str, Callable[[Any], Any]] = {
    "self": lambda module: CustomDiffusionAttnProcessor2_0(train_kv=False, train_q_out=False),
    "cross": lambda module: CustomDiffusionAttnProcessor2_0(
        train_kv=True,
        train_q_out=True,
        hidden_size=module.to_q.out_features,
        cross_attention_dim=module.to_k.in_features,
    ),
}


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
def test_custom_diffusion(order: str, tmp_path: Path) -> None:  # case 36
    family = BY_NAME["SDXL"]
    model = family.built()

    def customise() -> None:
        torch.manual_seed(4)
        made = {}
        for name in model.attn_processors:
            module = model.get_submodule(name.removesuffix(".processor"))
            made[name] = CUSTOM["cross" if module.is_cross_attention else "self"](module)
        model.set_attn_processor(made)

    def run() -> Tensor:
        return forward(model, family.inputs(model.config, family.small))

    plain = run()
    if order == "before the patch":
        customise()
    patch = sagepatch.apply(model, variant=EXACT)
    if order == "after the patch":
        customise()
        assert set(patch.replaced().values()) == {"CustomDiffusionAttnProcessor2_0"}
        run()
        assert set(calls(patch)) == {0}
        patch = sagepatch.apply(model, variant=EXACT)
    out = run()
    assert set(calls(patch)) == {1}
    model.save_attn_procs(tmp_path / "patched")
    patch.restore()
    assert torch.equal(run(), out)
    model.save_attn_procs(tmp_path / "plain")
    saved = [next((tmp_path / name).iterdir()).read_bytes() for name in ("patched", "plain")]
    assert saved[0] == saved[1]
    assert not torch.allclose(out, plain, atol=1e-3)
