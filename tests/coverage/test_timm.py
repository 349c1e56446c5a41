"""timm's models, tiny and true: every class that holds attention is known, patched ones compute
what they did, run the kernel in every layer, and come back bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm_models import INSTALLED, build, import_timm, module_classes
from torch import nn
from transformers_walk import holds_attention, verdict

import sagepatch
from sagepatch.errors import NothingPatched
from sagepatch.layer import SHORT
from sagepatch.patchers.sdpa_redirect import RANK

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs timm")

# Classes that multiply and take a softmax without a name that says attention.
UNNAMED = {
    "GlobalContext": "a pooling by one softmax over pixels",
    "HSMSSD": "a state space",
    "LambdaLayer": "a linear layer made of its context",
    "SpatialTransformerBlock": "attention inside a block, its softmax by hand",
}
VIT = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 4}
WINDOWS = {"img_size": 64, "embed_dim": 32, "num_heads": (2, 4), "depths": (1, 1)}
TWINS = {"img_size": 64, "embed_dims": (32, 32, 64, 64), "num_heads": (1, 2, 4, 4)}

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "vit_relpos_small_patch16_224": VIT,
    "vit_base_patch16_rope_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT | {"patch_size": 14, "img_size": 56},
    "naflexvit_base_patch16_gap": {"embed_dim": 64, "depth": 2, "num_heads": 4},
    "xcit_nano_12_p16_224": VIT,
    "swin_tiny_patch4_window7_224": WINDOWS | {"window_size": 4},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "fastvit_sa12": {},
    "caformer_s18": {},
    "iformer_t": {},
    "resnet50_clip": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
}
# Windows that SDPA gets with five dimensions, or three.
NOT_FOUR_DIMENSIONS: dict[str, dict[str, Any]] = {
    "samvit_base_patch16": VIT | {"global_attn_indexes": (1,), "window_size": 2},
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 32, "num_heads": 1, "stages": (1, 1, 1, 1)},
    "twins_svt_small": TWINS | {"depths": (1, 1, 1, 1)},
}
BY_HAND: dict[str, dict[str, Any]] = {
    "convit_tiny": {"img_size": 64},
    "edgenext_xx_small": {},
    "levit_128s": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "swinv2_tiny_window8_256": {"img_size": 64},
}


@pytest.fixture(autouse=True)
def _all_fused() -> Iterator[None]:
    layers = import_timm().layers
    layers.set_fused_attn(True, experimental=True)
    yield
    layers.set_fused_attn(True)


def _distance(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours - plain).norm() / plain.norm())


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    model, pictures = build(name, **MODELS[name])
    _awake(model)
    state = list(model.state_dict())
    with torch.no_grad():
        plain = model(pictures)
        patch = sagepatch.apply(model, variant="exact")
        assert _distance(model(pictures), plain) <= 1e-5
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
        assert list(model.state_dict()) == state
        assert 1e-6 < _distance(model(pictures), plain) <= 0.15
        for layer in patch.layers:
            assert layer.record.calls > 0, layer.name
            assert set(layer.record.fallbacks) <= {SHORT}, layer.name
        patch.restore()
        assert torch.equal(model(pictures), plain)


def _awake(model: nn.Module) -> None:
    """Layer scales start near zero, so that a fresh model's attention adds next to nothing."""
    for name, parameter in model.named_parameters():
        if "gamma" in name or name.endswith((".scale", "layer_scale")):
            nn.init.ones_(parameter)


def test_a_class_token_alone_asks_one_query() -> None:
    # case 14
    model, pictures = build("cait_xxs24_224", **VIT)
    with torch.no_grad():
        plain = model(pictures)
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
        assert torch.equal(model(pictures), plain)
    assert all(layer.record.fallbacks == {SHORT: 1} for layer in patch.layers)
    assert {left.reason for left in patch.left} == {"TalkingHeadAttn computes its softmax by hand"}


@pytest.mark.parametrize("name", NOT_FOUR_DIMENSIONS)
def test_windows_of_other_ranks_stay_torch_s_own(name: str) -> None:
    # case 49
    model, pictures = build(name, **NOT_FOUR_DIMENSIONS[name])
    with torch.no_grad():
        plain = model(pictures)
        patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
        model(pictures)
        assert any(RANK in layer.record.fallbacks for layer in patch.layers)
        patch.restore()
        assert torch.equal(model(pictures), plain)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_softmax_by_hand_is_named(name: str) -> None:
    model, _ = build(name, **BY_HAND[name])
    with pytest.raises(NothingPatched, match="computes its softmax by hand"):
        sagepatch.apply(model)


def test_unfused_attention_is_named() -> None:
    import_timm().layers.set_fused_attn(False)
    model, _ = build("vit_tiny_patch16_224", **VIT)
    with pytest.raises(NothingPatched, match="fused_attn is off"):
        sagepatch.apply(model)


def test_every_class_that_holds_attention_is_known() -> None:
    # case 37
    lost = {
        owner.__name__
        for owner in module_classes()
        if verdict(owner) is None and holds_attention(owner)
    }
    assert lost == UNNAMED.keys()


def test_the_page_is_current() -> None:
    from timm_page import PAGE, page

    if f"from timm {import_timm().__version__};" not in PAGE.read_text():
        pytest.skip("the page was made with another timm")
    assert PAGE.read_text() == page(), "run python tests/coverage/timm_page.py"


def test_torchvision_is_what_it_was() -> None:
    import importlib.util
    import sys

    import_timm()
    spec = importlib.util.find_spec("torchvision")
    assert ("torchvision" in sys.modules) <= (spec is not None)
