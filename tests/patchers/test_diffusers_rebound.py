"""Libraries that put functions of their own in the place of diffusers': the next patch runs them,
as an unpatched model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux
from models.diffusers_models import tiny_flux, tiny_sd3
from torch import Tensor, nn

import sagepatch
from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.errors import NothingPatched
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ledger import Record
from sagepatch.patchers.carrier import ATTRIBUTE, Carrier
from sagepatch.patchers.diffusers_copies import patched_copy
from sagepatch.patchers.diffusers_dispatch import REPLACED
from sagepatch.patchers.diffusers_processors import DISPATCH, Route, class_way


@torch.no_grad()
def forward(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


def patched(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Record]]:
    """The output of a patch with exact kernels, and the accounts of its layers."""
    with sagepatch.apply(model, variant="exact") as patch:
        return forward(model, inputs), [layer.record for layer in patch.layers]


def tripled(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if not isinstance(out, tuple):
            return 3 * out
        return tuple(None if one is None else 3 * one for one in out)

    return wrapper


REBOUND: dict[str, str] = {"a helper": "_get_qkv_projections", "the dispatcher": DISPATCH}


@pytest.mark.parametrize("name", REBOUND)
def test_what_was_rebound_between_two_patches_runs_in_the_second(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute = transformer_flux, REBOUND[name]
    model, inputs = tiny_flux()
    plain = forward(model, inputs)
    assert torch.allclose(patched(model, inputs)[0], plain, atol=1e-5)
    with monkeypatch.context() as other_library:
        other_library.setattr(owner, attribute, tripled(getattr(owner, attribute)))
        changed = forward(model, inputs)
        assert not torch.allclose(changed, plain, atol=1e-3)
        out, records = patched(model, inputs)
        assert torch.allclose(out, changed, atol=1e-5)
        # What a wrapped dispatcher does to a call is not ours to know: its owner gets them all.
        taken = {REPLACED: 1} if attribute == DISPATCH else {}
        assert all(record.calls == 1 and record.fallbacks == taken for record in records)
    # And gone when the library takes it back.
    out, records = patched(model, inputs)
    assert torch.allclose(out, plain, atol=1e-5)
    assert all(record.calls == 1 and not record.fallbacks for record in records)


CALLS = {
    "an old processor": (tiny_sd3, attention_processor.JointAttnProcessor2_0),
    "a dispatching processor": (tiny_flux, transformer_flux.FluxAttnProcessor),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_wrapped_between_two_patches_is_left_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, owner = CALLS[name]
    model, inputs = build()
    plain = forward(model, inputs)
    assert torch.allclose(patched(model, inputs)[0], plain, atol=1e-5)
    with monkeypatch.context() as other_library:
        other_library.setattr(owner, "__call__", tripled(owner.__call__))
        # What is in the wrapper nobody can read.
        with pytest.raises(NothingPatched, match=owner.__name__):
            sagepatch.apply(model, variant="exact")
        assert not torch.allclose(forward(model, inputs), plain, atol=1e-3)
    assert all(record.calls == 1 for record in patched(model, inputs)[1])


class Processor:
    """As diffusers' old ones."""

    def __call__(self, attn: nn.Module, q: Tensor) -> Tensor:
        return self._attend(q)

    def _attend(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def another_call(self: Any, attn: nn.Module, q: Tensor) -> Tensor:
    return 3 * F.scaled_dot_product_attention(q, q, q)


def by_hand(self: Any, q: Tensor) -> Tensor:
    return (q @ q.transpose(-1, -2)).softmax(-1) @ q


def test_a_copy_calls_what_its_class_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PatchedLayer("site", "self", Policy(), Request("exact"), unusable)
    attn, q = nn.Identity(), torch.randn(1, 2, 8, 16)
    setattr(attn, ATTRIBUTE, Carrier(layer.handle))
    for expected in (1, 3):
        ours = patched_copy(Processor(), layer.handle, Route.SDPA)
        assert torch.allclose(ours(attn, q), expected * F.scaled_dot_product_attention(q, q, q))
        assert layer.record.calls == 1
        layer.record.calls = 0
        monkeypatch.setattr(Processor, "__call__", another_call)


def test_what_a_class_reaches_is_read_from_the_methods_it_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert class_way(Processor).route is Route.SDPA
    monkeypatch.setattr(Processor, "_attend", by_hand)
    assert class_way(Processor).route is Route.NONE
