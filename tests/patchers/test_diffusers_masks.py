"""Padding stays out of patched attention: what padded tokens hold changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.diffusers_models import (
    forward,
    tiny_hunyuan_video,
    tiny_pixart,
    tiny_qwen_image,
)
from models.patching import patch_all

from sagepatch.spec import MaskKind

PADDED: dict[str, tuple[Callable[..., Any], int, set[MaskKind]]] = {
    # builder, text tokens of the second sample that count, kinds of mask that arrive
    "hunyuan_video": (tiny_hunyuan_video, 6, {MaskKind.KEY_PADDING, MaskKind.BOOL}),
    "qwen_image": (tiny_qwen_image, 5, {MaskKind.KEY_PADDING}),
    "pixart": (tiny_pixart, 4, {MaskKind.NONE, MaskKind.ADDITIVE}),
}


@pytest.mark.parametrize("variant", ["emulated.sage1_b_f32", "emulated.sage2_8"])
@pytest.mark.parametrize("family", PADDED)
def test_padded_text_has_no_say(family: str, variant: str) -> None:  # case 20
    build, valid, kinds = PADDED[family]
    model, inputs = build()
    inputs["encoder_hidden_states"][1, valid:] = 5.0
    reference = forward(model, inputs)
    (mask_name,) = (name for name in inputs if name.startswith("encoder_") and "mask" in name)
    unmasked = forward(model, {**inputs, mask_name: torch.ones_like(inputs[mask_name])})
    with patch_all(model, variant) as patched:
        out = forward(model, inputs)
        seen = {spec.mask for layer in patched.layers.values() for spec in layer.record.specs}
    assert seen == kinds
    assert not patched.fallbacks()
    price = (out - reference).norm() / reference.norm()
    # Attending to the padding would cost several times what quantising costs.
    assert price < 0.2 * (unmasked - reference).norm() / reference.norm()
    assert price < 5e-3


@pytest.mark.parametrize("family", PADDED)
def test_text_that_counts_has_a_say(family: str) -> None:
    build, valid, _ = PADDED[family]
    model, inputs = build()
    with patch_all(model, "emulated.sage2_8"):
        out = forward(model, inputs)
        text = inputs["encoder_hidden_states"].clone()
        text[1, valid - 1] += 5.0
        other = forward(model, {**inputs, "encoder_hidden_states": text})
    assert torch.equal(other[0], out[0])
    assert not torch.allclose(other[1], out[1], rtol=1e-3, atol=1e-3)
