"""transformers' families, tiny and true: patched in every layer, equal where exact, close where
quantised, bit-equal when restored. Families that cannot be patched say why and stay as they were.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from transformers_tiny import Tiny, installed
from transformers_types import cases, model_types

import sagepatch
from sagepatch.errors import NothingPatched
from sagepatch.layer import SHORT

RECIPE = "sage2_8"
# Relative distance of an output: rounding of FP32 in another order, and what 8 bits cost a model.
EXACT, QUANTISED = 1e-5, 0.15


def _distances(ours: list[Tensor], plain: list[Tensor]) -> list[float]:
    return [
        float((o.double() - p.double()).norm() / p.double().norm().clamp(min=1e-9))
        for o, p in zip(ours, plain, strict=True)
    ]


def _same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    return all(torch.equal(o, p) for o, p in zip(ours, plain, strict=True))


def _configured(tiny: Tiny) -> list[object]:
    return [
        (name, module.config._attn_implementation, set(vars(module)))
        for name, module in tiny.model.named_modules()
        if hasattr(module, "config")
    ]


@pytest.mark.parametrize("model_type", cases("patched"))
def test_family(model_type: str) -> None:
    # cases 11, 12, 33, 37, 42
    tiny = installed(model_type, reached=True)
    plain, before = tiny.outputs(), _configured(tiny)
    assert plain
    assert all(torch.isfinite(out).all() for out in plain)
    patch = sagepatch.apply(tiny.model, variant="exact")
    assert max(_distances(tiny.outputs(), plain)) <= EXACT
    patch = sagepatch.apply(tiny.model, variant=RECIPE, emulate=True)
    assert 1e-6 < max(_distances(tiny.outputs(), plain)) <= QUANTISED
    for layer in patch.layers:
        assert layer.record.calls > 0, layer.name
        assert set(layer.record.fallbacks) <= {SHORT}, layer.name
    patch.restore()
    assert _same(tiny.outputs(), plain)
    assert _configured(tiny) == before


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", model_types("patched"))
def test_padding_on_the_left(model_type: str, implementation: str) -> None:
    # cases 18, 19, 20, 41: bool masks of SDPA and additive ones of eager attention
    tiny = installed(model_type, reached=True)
    tokens, names = tiny.inputs.get("input_ids"), inspect.signature(tiny.model.forward).parameters
    if tokens is None or "attention_mask" not in names:
        pytest.skip("takes no padding")
    if implementation == "eager":
        tiny.model.set_attn_implementation("eager")
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    tiny.inputs["attention_mask"] = mask
    plain = tiny.outputs()
    sagepatch.apply(tiny.model, variant="exact")
    exact = tiny.outputs()
    patch = sagepatch.apply(tiny.model, variant=RECIPE, emulate=True)
    quantised = tiny.outputs()
    assert all(torch.isfinite(out).all() for out in (*exact, *quantised))
    # What padded positions hold is nobody's, and differs between ways to mask.
    assert max(_distances(_kept(exact, mask), _kept(plain, mask))) <= EXACT
    assert max(_distances(_kept(quantised, mask), _kept(plain, mask))) <= QUANTISED
    patch.restore()
    assert _same(tiny.outputs(), plain)


def _kept(outputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    """The positions that are no padding, in outputs that have positions."""
    return [
        out[mask.bool()] if out.dim() >= 3 and out.shape[:2] == mask.shape else out
        for out in outputs
    ]


@pytest.mark.parametrize("model_type", cases("by hand"))
def test_family_that_computes_its_scores_itself(model_type: str) -> None:
    _left(model_type, "by hand|a way of its own|a fused path")


@pytest.mark.parametrize("model_type", cases("refused"))
def test_family_with_sparse_masks(model_type: str) -> None:
    _left(model_type, "sparse or special masks")


def _left(model_type: str, why: str) -> None:
    tiny = installed(model_type)
    plain, before = tiny.outputs(), _configured(tiny)
    with pytest.raises(NothingPatched, match=why):
        sagepatch.apply(tiny.model)
    assert _same(tiny.outputs(), plain)
    assert _configured(tiny) == before
