"""A processor's state under a patch: what its calls, its user or a library set on it is one state,
be it the processor of one layer or of all.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from models.diffusers_models import BUILDERS, tiny_flux, tiny_unet
from torch import Tensor, nn

import sagepatch


class Scaled(AttnProcessor2_0):
    """Its user turns `strength` at any time; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 1.0
        self.calls = 0

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        out: Tensor = super().__call__(attn, hidden_states, *args, **kwargs)
        return out * self.strength * (2.0 if self.calls > 25 else 1.0)


class ScaledModule(nn.Module):
    """The same with a parameter, as adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.strength, self.calls = 1.0, 0
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        q = attn.to_q(hidden_states)[:, None]
        own = torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]
        out: Tensor = attn.to_out[0](own) * self.strength * self.gain
        return out


@torch.no_grad()
def forward(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


@pytest.mark.parametrize("shared", [True, False], ids=["one for all layers", "one a layer"])
@pytest.mark.parametrize("owner", [Scaled, ScaledModule])
def test_one_state_for_processor_stand_in_and_user(owner: type, shared: bool) -> None:
    def run(patched: bool) -> tuple[list[Tensor], list[int]]:
        model, inputs = tiny_unet()
        one = owner()
        held = {name: one if shared else owner() for name in model.attn_processors}
        model.set_attn_processor(dict(held))
        # Fewer calls than all of them take at once, more than one layer makes in the end.
        outs = [forward(model, inputs)]
        patch = sagepatch.apply(model, variant="exact") if patched else None
        outs.append(forward(model, inputs))
        for processor in held.values():
            processor.strength = 0.5
        outs.append(forward(model, inputs))
        for processor in model.attn_processors.values():
            processor.strength = 0.25
        outs.append(forward(model, inputs))
        if patch is not None:
            assert [layer.record.calls for layer in patch.layers] == [3] * len(held)
            patch.restore()
        assert model.attn_processors == held
        outs.append(forward(model, inputs))
        return outs, [processor.calls for processor in held.values()]

    plain, ours = run(False), run(True)
    assert ours[1] == plain[1]
    for out, expected in zip(ours[0], plain[0], strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain[0][1], plain[0][2], rtol=1e-2, atol=1e-3)


def test_processors_that_move_take_no_layer_with_them() -> None:
    """A stand-in that its user gives to another model, or back after others, is the layer's that
    calls it."""
    model, inputs = tiny_unet()
    plain = forward(model, inputs)
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True)
    kept = model.attn_processors
    model.set_attn_processor(AttnProcessor2_0())
    assert len(patch.replaced()) == len(patch.layers)
    other, _ = tiny_unet()
    other.set_attn_processor(dict(kept))
    assert torch.equal(forward(other, inputs), plain)
    assert all(layer.record.calls == 0 for layer in patch.layers)
    model.set_attn_processor(dict(reversed(kept.items())))
    assert not patch.replaced()
    forward(model, inputs)
    assert all(layer.record.calls == 1 for layer in patch.layers)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_processors_that_moved_come_back_as_what_they_stand_for(family: str) -> None:
    model, inputs = BUILDERS[family]()
    plain = forward(model, inputs)
    classes = {name: type(one) for name, one in model.attn_processors.items()}
    patch = sagepatch.apply(model, variant="exact")
    moved = model.attn_processors
    model.set_attn_processor(dict(zip(moved, reversed(moved.values()), strict=True)))
    patch.restore()
    assert {name: type(one) for name, one in model.attn_processors.items()} == classes
    assert torch.equal(forward(model, inputs), plain)


def test_copies_of_a_stand_in_have_a_state_of_their_own() -> None:
    model, _ = tiny_unet()
    for processor in model.attn_processors.values():
        processor.words = ["one"]
    with sagepatch.apply(model, variant="exact"):
        processor = next(iter(model.attn_processors.values()))
        twins = [copy.copy(processor), copy.deepcopy(processor)]
        twins.append(pickle.loads(pickle.dumps(processor)))
        for twin in twins:
            assert type(twin) is AttnProcessor2_0
            assert vars(twin) == {"words": ["one"]}
            twin.words = []
        assert processor.words == ["one"]


def test_a_state_set_on_a_dispatcher_s_stand_in_comes_back() -> None:
    model, inputs = tiny_flux()
    held = model.transformer_blocks[0].attn.processor
    with sagepatch.apply(model, variant="exact"):
        model.transformer_blocks[0].attn.processor.words = ["one"]
        forward(model, inputs)
    assert held.words == ["one"]
