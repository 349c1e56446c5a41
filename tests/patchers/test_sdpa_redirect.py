"""`SdpaRedirect`: which calls of SDPA reach a layer, which stay torch's own, with what result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers.sdpa_redirect import (
    DROPOUT,
    MASK,
    OBSERVED,
    OPTIONS,
    RANK,
    SHAPES,
    SUBCLASS,
    TRAINING,
    SdpaRedirect,
)


@pytest.fixture
def layer() -> PatchedLayer:
    """A layer that runs emulated `sage1_b`."""
    request = Request("emulated.sage1_b", emulate=True)
    return PatchedLayer("attn", "self", Policy(emulate=True), request, unusable)


def _qkv(*, Hkv: int = 4, Dv: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 33, 16, generator=g)
    return q, torch.randn(2, Hkv, 41, 16, generator=g), torch.randn(2, Hkv, 41, Dv, generator=g)


def _both(layer: PatchedLayer, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    plain = F.scaled_dot_product_attention(*args, **kwargs)
    with SdpaRedirect(layer.handle):
        return F.scaled_dot_product_attention(*args, **kwargs), plain


def _close(out: Tensor, plain: Tensor) -> bool:
    return (out - plain).norm() < 0.03 * plain.norm() and not torch.equal(out, plain)


CALL_FORMS = {
    "positional": lambda q, k, v, m: ((q, k, v), {}),
    "keyword": lambda q, k, v, m: ((), {"query": q, "key": k, "value": v}),
    "mixed": lambda q, k, v, m: ((q,), {"value": v, "key": k, "scale": 0.3}),
    "mask as the fourth": lambda q, k, v, m: ((q, k, v, m), {}),
    "every position": lambda q, k, v, m: ((q, k, v, m, 0.0, False), {"scale": None}),
    "causal": lambda q, k, v, m: ((q, k, v), {"is_causal": True}),
    "additive mask": lambda q, k, v, m: ((q, k, v), {"attn_mask": torch.where(m, 0.5, -3.0)}),
}


@pytest.mark.parametrize("form", CALL_FORMS)
def test_every_form_of_the_call_reaches_the_layer(form: str, layer: PatchedLayer) -> None:
    # case 49
    mask = torch.rand(33, 41, generator=torch.Generator().manual_seed(3)) > 0.3
    args, kwargs = CALL_FORMS[form](*_qkv(), mask)
    out, plain = _both(layer, *args, **kwargs)
    assert _close(out, plain)
    assert layer.record.by_variant == {"emulated.sage1_b": 1}


@pytest.mark.parametrize("Hkv", [1, 2, 4])
def test_grouped_heads_and_another_value_size(Hkv: int, layer: PatchedLayer) -> None:
    # cases 11, 12
    out, plain = _both(layer, *_qkv(Hkv=Hkv, Dv=24), enable_gqa=True)
    assert out.shape == (2, 4, 33, 24)
    assert _close(out, plain)


def test_output_lies_in_memory_as_its_users_expect(layer: PatchedLayer) -> None:
    out, _ = _both(layer, *_qkv())
    assert out.transpose(1, 2).is_contiguous()
    out.transpose(1, 2).view(2, 33, 64)


UNCHANGED = {
    "3-D": (lambda q, k, v: ((q[0], k[0], v[0]), {}), RANK),
    "5-D": (lambda q, k, v: ((q[None], k[None], v[None]), {}), RANK),
    "a mask and is_causal": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(33, 41) > 0, "is_causal": True}),
        MASK,
    ),
    "grouped heads unasked": (lambda q, k, v: ((q, k[:, :2], v[:, :2]), {}), SHAPES),
    "an integer mask": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(33, 41, dtype=torch.int64)}),
        MASK,
    ),
    "a batch that broadcasts": (lambda q, k, v: ((q[:1], k, v), {}), SHAPES),
    "dtypes that differ": (lambda q, k, v: ((q, k, v.double()), {}), SHAPES),
    "a scale that is a tensor": (
        lambda q, k, v: ((q, k, v), {"scale": torch.tensor(0.25)}),
        OPTIONS,
    ),
    "heads of no size": (lambda q, k, v: ((q[..., :0], k[..., :0], v), {}), SHAPES),
    "two devices": (lambda q, k, v: ((q.to("meta"), k, v), {}), SHAPES),
}


def _outcome(*args: Any, **kwargs: Any) -> Tensor | str:
    try:
        return F.scaled_dot_product_attention(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        return str(error)


@pytest.mark.parametrize("what", UNCHANGED)
def test_what_only_torch_can_mean_stays_torch(what: str, layer: PatchedLayer) -> None:
    # cases 48, 49: the same values, or torch's own error
    build, reason = UNCHANGED[what]
    args, kwargs = build(*_qkv())
    plain = _outcome(*args, **kwargs)
    with SdpaRedirect(layer.handle):
        out = _outcome(*args, **kwargs)
    if isinstance(plain, str):
        assert out == plain
    else:
        torch.testing.assert_close(out, plain, rtol=0, atol=0, equal_nan=True)
    assert layer.record.fallbacks == {reason: 1}


def test_dropout_stays_torch(layer: PatchedLayer) -> None:
    torch.manual_seed(5)
    plain = F.scaled_dot_product_attention(*_qkv(), dropout_p=0.1)
    torch.manual_seed(5)
    with SdpaRedirect(layer.handle):
        out = F.scaled_dot_product_attention(*_qkv(), dropout_p=0.1)
    assert torch.equal(out, plain)
    assert layer.record.fallbacks == {DROPOUT: 1}


def test_tensor_subclasses_stay_torch(layer: PatchedLayer) -> None:
    class Marked(Tensor):
        pass

    q, k, v = (t.as_subclass(Marked) for t in _qkv())
    with SdpaRedirect(layer.handle):
        out = F.scaled_dot_product_attention(q, k, v)
    assert isinstance(out, Marked)
    assert layer.record.fallbacks == {SUBCLASS: 1}


def test_gradients_are_torch_s_own(layer: PatchedLayer) -> None:
    # case 46
    q, k, v = (t.requires_grad_() for t in _qkv())
    out, plain = _both(layer, q, k, v)
    assert torch.equal(out, plain)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert layer.record.fallbacks == {TRAINING: 1}
    with torch.no_grad():
        assert _close(*_both(layer, q, k, v))


class _Skip(TorchFunctionMode):
    """Gives v instead of attention, as guidance by skipped scores does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return args[2]
        return func(*args, **(kwargs or {}))


def test_a_mode_around_us_sees_the_call(layer: PatchedLayer) -> None:
    q, k, v = _qkv()
    with _Skip(), SdpaRedirect(layer.handle):
        assert F.scaled_dot_product_attention(q, k, v) is v
    assert layer.record.fallbacks == {OBSERVED: 1}


def test_a_default_device_hides_nothing(layer: PatchedLayer) -> None:
    with torch.device("cpu"):
        assert _close(*_both(layer, *_qkv()))


def test_nested_redirects_go_to_the_inner_layer(layer: PatchedLayer) -> None:
    outer = PatchedLayer("outer", "self", Policy(), Request("exact"), unusable)
    with SdpaRedirect(outer.handle):
        _both(layer, *_qkv())
    assert (outer.record.calls, layer.record.calls) == (1, 1)


def test_autocast_casts_as_torch_does(layer: PatchedLayer) -> None:
    q, k, v = _qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = _both(layer, q, k.bfloat16(), v)
    assert out.dtype == plain.dtype == torch.bfloat16
    assert (out - plain).norm() < 0.03 * plain.norm()


def test_nothing_of_torch_changes(layer: PatchedLayer) -> None:
    # case 32
    before = F.scaled_dot_product_attention
    q, k, v = _qkv()
    with SdpaRedirect(layer.handle):
        assert F.scaled_dot_product_attention is before
    plain = F.scaled_dot_product_attention(q, k, v)
    assert layer.record.calls == 0
    assert torch.equal(plain, torch.nn.functional.scaled_dot_product_attention(q, k, v))
