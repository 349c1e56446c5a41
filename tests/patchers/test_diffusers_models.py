"""Every family of diffusers: patched output close, the quantised op at each site, restore exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.diffusers_models import BUILDERS, forward
from models.patching import patch_all
from torch import Tensor, nn

# The worst of the families below is 0.009 for the fast recipe and 0.001 for the safe one.
CLOSE = {"emulated.sage1_b_f32": 5e-3, "emulated.sage2_8": 3e-2}
SITES = {
    "flux": 4,
    "sd3": 3,
    "unet": 20,
    "sdxl_unet": 16,
    "cogvideox": 2,
    "wan": 4,
    "hunyuan_video": 5,
    "qwen_image": 2,
    "pixart": 4,
}


def relative(out: Tensor, reference: Tensor) -> float:
    return ((out - reference).norm() / reference.norm()).item()


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a patch could leave a trace in."""
    return {
        "keys": list(model.state_dict()),
        "modules": [name for name, _ in model.named_modules()],
        "processors": {name: id(value) for name, value in model.attn_processors.items()},
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: dict(module._forward_hooks) for name, module in model.named_modules()},
        "config": dict(model.config),
    }


@pytest.mark.parametrize("variant", CLOSE)
@pytest.mark.parametrize("family", BUILDERS)
def test_patched_runs_the_kernel_at_every_site_and_restores_to_the_bit(
    family: str, variant: str
) -> None:
    model, inputs = BUILDERS[family]()
    before, reference = snapshot(model), forward(model, inputs)
    with patch_all(model, variant, prefix="denoiser") as patched:
        out = forward(model, inputs)
        # case 37: what was found, what was patched, what really ran
        assert len(patched.layers) == SITES[family]
        assert patched.found.left == ()
        assert patched.calls() == [1] * SITES[family]
        assert patched.ran() == {variant: SITES[family]}
        assert not patched.fallbacks()
        assert not patched.replaced()
        assert all(name.startswith("denoiser.") for name in patched.layers)
    assert 0 < relative(out, reference) < CLOSE[variant]
    assert torch.equal(forward(model, inputs), reference)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("family", "site", "kind"),
    [
        ("flux", "transformer_blocks.0.attn", "joint"),
        ("flux", "single_transformer_blocks.1.attn", "joint"),
        ("sd3", "transformer_blocks.2.attn", "joint"),
        ("unet", "mid_block.attentions.0.transformer_blocks.0.attn1", "self"),
        ("unet", "mid_block.attentions.0.transformer_blocks.0.attn2", "cross"),
        ("cogvideox", "transformer_blocks.0.attn1", "joint"),
        ("wan", "blocks.0.attn1", "self"),
        ("wan", "blocks.0.attn2", "cross"),
        ("hunyuan_video", "context_embedder.token_refiner.refiner_blocks.0.attn", "self"),
        ("hunyuan_video", "single_transformer_blocks.0.attn", "joint"),
        ("qwen_image", "transformer_blocks.0.attn", "joint"),
        ("pixart", "transformer_blocks.0.attn2", "cross"),
    ],
)
def test_site_is_named_by_its_module_path_and_knows_its_kind(
    family: str, site: str, kind: str
) -> None:
    model, _ = BUILDERS[family]()
    with patch_all(model, "emulated.sage2_8") as patched:
        assert patched.layers[site].kind == kind
        again = patch_all(model, "emulated.sage2_8").found.sites
    # A patched model is found as it was: names and kinds go into a plan's fingerprint.
    assert [(s.name, s.kind) for s in again] == [(s.name, s.kind) for s in patched.found.sites]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["flux", "pixart"])
def test_half_precision_models_keep_their_dtype(family: str, dtype: torch.dtype) -> None:
    model, inputs = BUILDERS[family]()
    model = model.to(dtype)
    inputs = {
        key: value.to(dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and "ids" not in key
        else value
        for key, value in inputs.items()
    }
    reference = forward(model, inputs)
    with patch_all(model, "emulated.sage1_b_f32") as patched:
        out = forward(model, inputs)
    assert out.dtype == dtype
    assert not patched.fallbacks()
    assert relative(out.float(), reference.float()) < 2e-2


def test_autocast_reaches_the_op_in_its_dtype() -> None:
    model, inputs = BUILDERS["sd3"]()
    with patch_all(model, "emulated.sage1_b_f32") as patched:
        with torch.autocast("cpu", torch.bfloat16):
            forward(model, inputs)
        specs = {spec.dtype for layer in patched.layers.values() for spec in layer.record.specs}
    assert specs == {"bf16"}


def test_a_model_without_attention_has_no_sites() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    patched = patch_all(plain, "emulated.sage2_8")
    assert patched.found.sites == patched.found.left == ()  # case 37
