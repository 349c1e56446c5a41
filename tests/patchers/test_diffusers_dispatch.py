"""Our stand-in for diffusers' dispatcher against the original: layouts, masks, call forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers.diffusers_dispatch import EXTRA, SPARSE, make_dispatch
from sagepatch.patchers.parallel import OTHER_KIND
from sagepatch.patchers.sdpa_redirect import DROPOUT, MASK, OBSERVED, TRAINING

EXACT = "sdpa.exact"


def a_layer(variant: str = EXACT) -> PatchedLayer:
    return PatchedLayer("site", "self", Policy(emulate=True), Request(variant, True), unusable)


def tensors(
    B: int = 2, Sq: int = 9, Skv: int = 9, Hq: int = 4, Hkv: int = 4, D: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, Sq, Hq, D, generator=generator)
    k = torch.randn(B, Skv, Hkv, D, generator=generator)
    return q, k, torch.randn(B, Skv, Hkv, D, generator=generator)


def mask(*shape: int) -> Tensor:
    kept = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    kept[..., 0] = True
    return kept


PADDING = torch.arange(9)[None] < torch.tensor([[9], [5]])

SAME: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "plain": (tensors(), {}),
    "as many tokens as heads": (tensors(Sq=8, Skv=8, Hq=8, Hkv=8), {}),  # case 10
    "cross": (tensors(Sq=13, Skv=5), {}),
    "causal": (tensors(), {"is_causal": True}),
    "scale": (tensors(), {"scale": 0.5}),
    "grouped": (tensors(Hkv=2), {"enable_gqa": True}),
    "bool mask": (tensors(), {"attn_mask": mask(2, 1, 9, 9)}),
    "key padding": (tensors(), {"attn_mask": PADDING[:, None, None]}),
    "padding of two axes": (tensors(), {"attn_mask": PADDING}),
    "padding of two axes, as many samples as tokens": (
        tensors(B=9),
        {"attn_mask": mask(9, 9)},
    ),
    "square mask of two axes": (tensors(), {"attn_mask": mask(9, 9)}),
    "additive": (tensors(), {"attn_mask": torch.where(mask(2, 4, 9, 9), 0.0, -10000.0)}),
    "mask of three axes": (tensors(B=1), {"attn_mask": mask(1, 9, 9)}),
}


@pytest.mark.parametrize("case", SAME)
def test_exact_layer_equals_the_original(case: str) -> None:
    (q, k, v), options = SAME[case]
    layer = a_layer()
    ours = make_dispatch(dispatch_attention_fn, None)
    out = ours(q, k, v, **options, backend=layer.handle)
    torch.testing.assert_close(out, dispatch_attention_fn(q, k, v, **options))
    assert layer.record.by_variant == {EXACT: 1}
    assert not layer.record.fallbacks
    assert out.is_contiguous()  # [B, S, H, D], so that merging the heads costs nothing


@pytest.mark.parametrize("case", SAME)
def test_quantised_layer_is_close(case: str) -> None:
    (q, k, v), options = SAME[case]
    layer = a_layer("emulated.sage2_8")
    out = make_dispatch(dispatch_attention_fn, None)(q, k, v, **options, backend=layer.handle)
    reference = dispatch_attention_fn(q, k, v, **options)
    assert 0 < ((out - reference).norm() / reference.norm()).item() < 0.1
    assert layer.record.by_variant == {"emulated.sage2_8": 1}


def test_signature_is_the_originals() -> None:
    ours = inspect.signature(make_dispatch(dispatch_attention_fn, None)).parameters.values()
    theirs = inspect.signature(dispatch_attention_fn).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_positional_arguments_mean_what_they_mean_to_the_original() -> None:  # case 49
    q, k, v = tensors()
    arguments = (q, k, v, mask(2, 1, 9, 9), 0.0, False, 0.3, False, None)
    ours = make_dispatch(dispatch_attention_fn, None)
    out = ours(*arguments, backend=a_layer().handle)
    torch.testing.assert_close(out, dispatch_attention_fn(*arguments))


class Recorder:
    """Stands in for the original dispatcher and remembers its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "the original's"


LEFT_ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "another parallelism": ({"parallel_config": object()}, OTHER_KIND),
    "arguments of one backend": ({"attention_kwargs": {"window_size": (1, 1)}}, EXTRA),
    "block mask": ({"attn_mask": object()}, SPARSE),
    "dropout": ({"dropout_p": 0.1}, DROPOUT),
    "mask and causal": ({"attn_mask": mask(9, 9), "is_causal": True}, MASK),
    "integer mask": ({"attn_mask": torch.ones(2, 1, 1, 9, dtype=torch.long)}, MASK),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_call_that_is_not_ours_reaches_the_original_unchanged(case: str) -> None:
    options, reason = LEFT_ALONE[case]
    q, k, v = tensors()
    layer, plain = a_layer("emulated.sage2_8"), Recorder()
    out = make_dispatch(plain, "flash")(q, k, v, **options, backend=layer.handle)
    assert out == "the original's"
    ((args, kwargs),) = plain.calls
    assert all(a is b for a, b in zip(args, (q, k, v), strict=True))
    assert all(kwargs[name] is value for name, value in options.items())
    assert kwargs["backend"] == "flash"  # what the layer was told to use before it was patched
    assert layer.record.fallbacks == {reason: 1}


def test_call_without_a_handle_is_the_originals() -> None:
    q, k, v = tensors()
    plain = Recorder()
    for backend in (None, "native"):
        make_dispatch(plain, "flash")(q, k, v, backend=backend)
    assert [kwargs["backend"] for _, kwargs in plain.calls] == [None, "native"]


def test_training_call_is_the_originals_and_counted() -> None:  # case 46
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    layer = a_layer("emulated.sage2_8")
    out = make_dispatch(dispatch_attention_fn, None)(q, k, v, backend=layer.handle)
    assert torch.equal(out, dispatch_attention_fn(q, k, v))
    assert out.requires_grad
    assert layer.record.fallbacks == {TRAINING: 1}
    with torch.no_grad():
        make_dispatch(dispatch_attention_fn, None)(q, k, v, backend=layer.handle)
    assert layer.record.by_variant["emulated.sage2_8"] == 1


def test_another_function_mode_sees_the_sdpa_call() -> None:
    seen: list[Callable[..., Any]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = tensors()
    layer = a_layer("emulated.sage2_8")
    with Watch():
        out = make_dispatch(dispatch_attention_fn, None)(q, k, v, backend=layer.handle)
    assert torch.nn.functional.scaled_dot_product_attention in seen
    assert torch.equal(out, dispatch_attention_fn(q, k, v))
    assert layer.record.fallbacks == {OBSERVED: 1}


def test_global_backend_stays_what_it_was() -> None:  # case 34
    registry = attention_dispatch._AttentionBackendRegistry
    before = registry.get_active_backend()
    q, k, v = tensors()
    make_dispatch(dispatch_attention_fn, None)(q, k, v, backend=a_layer().handle)
    assert registry.get_active_backend() == before
