"""`inspect` counts a forward as the coverage pages do, at published geometry, on shapes alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers_families import FAMILIES
from diffusers_shares import kept_table
from torch import nn

from sagepatch.cli.forward_count import Asked, Counted, count
from sagepatch.cli.forward_inputs import FORWARDS
from sagepatch.patchers.model import Parts, search

# What the page is counted at, where that is not the pipeline's own usual size.
PAGE = {
    "Wan 2.1 / 2.2, text to video": Asked(720, 1280, 81),
    "CogVideoX 5B, 1.5": Asked(768, 1360, 81),
    "Mochi": Asked(480, 848, 163),
    "SD 1.x / 2.x": Asked(512, 512),
    "SDXL": Asked(1024, 1024),
}
BY_NAME = {family.name: family for family in FAMILIES}
KNOWN = [family for family in FAMILIES if family.model in FORWARDS and family.full is not None]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=() if family.name in ("SD 1.x / 2.x", "LTX-Video") else pytest.mark.slow,
        )
        for family in KNOWN
        if "image to video" not in family.name
    ],
    ids=str,
)
def test_it_counts_what_the_page_says(family) -> None:
    with torch.device("meta"):
        model = family.built(full=True).to("meta")
    sites = search(Parts(family.model, {"": model})).sites
    (found,) = count({"": model}, sites, PAGE.get(family.name, Asked()))
    page = kept_table()[family.name]
    assert found.cost is not None, found.why_not
    assert f"{100 * found.cost.share():.0f}" == page.attention_percent
    assert f"{found.cost.total / 1e12:.1f}" == page.tera_operations
    # Every call is some layer's.
    assert set(found.shapes) == {site.name for site in sites}


@pytest.mark.parametrize(
    ("changes", "size", "tokens"),
    [
        # Cosmos 1, 8 frames a latent; Predict 2 makes a picture, and a film from a picture.
        ({}, "1280 x 704 x 121 frames", 16 * 44 * 80),
        ({"extra_pos_embed_type": None}, "1360 x 768", 48 * 85),
        (
            {"extra_pos_embed_type": None, "in_channels": 5},
            "1280 x 704 x 93 frames",
            24 * 44 * 80,
        ),
    ],
)
def test_sizes_of_cosmos(monkeypatch, changes, size: str, tokens: int) -> None:
    from diffusers.models.transformers import transformer_cosmos

    # What torchvision does to the padding mask, which may not be there.
    resize = SimpleNamespace(
        functional=SimpleNamespace(
            resize=lambda mask, size, interpolation: nn.functional.interpolate(mask, size)
        ),
        InterpolationMode=SimpleNamespace(NEAREST="nearest"),
    )
    monkeypatch.setattr(transformer_cosmos, "transforms", resize, raising=False)
    tiny = {**BY_NAME["Cosmos"].tiny, "max_size": (128, 240, 240), "concat_padding_mask": True}
    found = _tiny("CosmosTransformer3DModel", {**tiny, **changes})
    assert found.size == f"{size}, 512 tokens of text"
    calls = found.shapes["transformer_blocks.0.attn1"]
    assert [(one.queries, one.keys, one.mask) for one in calls] == [(tokens, tokens, False)]


def test_cosmos_without_torchvision_says_so(monkeypatch) -> None:
    from diffusers.models.transformers import transformer_cosmos

    monkeypatch.delattr(transformer_cosmos, "transforms", raising=False)
    tiny = BY_NAME["Cosmos"].tiny
    found = _tiny("CosmosTransformer3DModel", {**tiny, "concat_padding_mask": True})
    assert found.cost is None
    assert "name 'transforms' is not defined" in found.why_not


@pytest.mark.parametrize(
    ("family", "queries"),
    # 1280 pixels are 30 latents of the prior, and 30 x 10.67 of the decoder, halved at its start.
    [("Stable Cascade, prior", 30 * 24), ("Stable Cascade, decoder", 160 * 128)],
)
def test_sizes_of_stable_cascade(family: str, queries: int) -> None:
    found = _tiny("StableCascadeUNet", BY_NAME[family].tiny, Asked(1280, 1024))
    assert max(one.queries for calls in found.shapes.values() for one in calls) == queries


@pytest.mark.parametrize(("width", "tokens"), [(256, 16 * 16), (128, 16 * 16), (512, 16 * 16)])
def test_hidream_pads_what_is_not_square(width: int, tokens: int) -> None:
    """The tiny model takes pictures of up to 32 x 32 latents, 16 x 16 tokens."""
    asked = Asked(256 * 256 // width, width, text=8)
    found = _tiny("HiDreamImageTransformer2DModel", BY_NAME["HiDream-I1"].tiny, asked)
    everything = tokens + 3 * 8
    for calls in found.shapes.values():
        assert [(one.queries, one.keys) for one in calls] == [(everything, everything)]


def test_hidream_runs_its_own_experts_afterwards() -> None:
    with torch.device("meta"):
        model = diffusers.HiDreamImageTransformer2DModel(**BY_NAME["HiDream-I1"].tiny)
    (found,) = count({"": model}, (), Asked(256, 256))
    assert found.cost is not None, found.why_not
    assert not any("moe_infer" in vars(part) for part in model.modules())


def test_hunyuan_video15_of_an_unknown_size_asks_for_one() -> None:
    tiny = {**BY_NAME["HunyuanVideo 1.5"].tiny, "target_size": 16}
    assert "--width" in _tiny("HunyuanVideo15Transformer3DModel", tiny).why_not
    found = _tiny("HunyuanVideo15Transformer3DModel", tiny, Asked(64, 48, 5, text=10))
    assert found.cost is not None, found.why_not
    tokens = 2 * 4 * 3 + 10 + 256 + 729
    (call,) = found.shapes["transformer_blocks.0.attn"]
    assert (call.queries, call.keys, call.mask) == (tokens, tokens, True)


def _tiny(kind: str, config: dict[str, Any], asked: Asked = Asked()) -> Counted:  # noqa: B008
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config).to("meta")
    (found,) = count({"": model}, search(Parts(kind, {"": model})).sites, asked)
    return found


def test_every_class_is_tried() -> None:
    assert {family.model for family in KNOWN} == set(FORWARDS)
