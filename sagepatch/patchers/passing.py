"""Calls of layers that run exact attention: counted, and left to whoever served them unpatched.

A patched layer that a plan leaves exact should cost the host nothing worth naming. So an SDPA call
whose form was served before goes to torch unchanged. And a method whose SDPA calls were seen once
(its form is known) runs as if unpatched, and the same calls are counted again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sagepatch.backends.catalogue import SDPA
from sagepatch.functional import AUTOCAST_DEVICES, autocast
from sagepatch.layer import PatchedLayer, find_layer
from sagepatch.spec import AttnSpec, Call


def passing(handle: Tensor) -> PatchedLayer | None:
    """The layer of this handle where it runs exact attention, whatever the call, and nothing
    watches or records the call; else None.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_function_stack() > 0:
        return None
    layer = find_layer(handle)
    return layer if layer is not None and layer.passing else None


def form_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """What the account tells apart about an SDPA call, cheaply; None where gradients or unusual
    tensors want a closer look.
    """
    if not type(query) is type(key) is type(value) is Tensor or query.is_nested:
        return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        return None
    mask = None
    if attn_mask is not None:
        if type(attn_mask) is not Tensor or attn_mask.requires_grad:
            return None
        mask = attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device
    device = query.device
    return (
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
        *(device, key.device, value.device, mask, dropout_p, is_causal, enable_gqa),
        device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type),
    )


def counted(layer: PatchedLayer, form: tuple[Any, ...]) -> bool:
    """Whether a call of this form was served before: then this one is counted, and may pass."""
    spec = layer.passes.get(form)
    if spec is None:
        return False
    layer.record.ran(spec, SDPA.name)
    _note(layer, spec)
    return True


def remember(layer: PatchedLayer, form: tuple[Any, ...], call: Call) -> None:
    """Count a call that goes to torch as it came, and from now on others of this form: they mean to
    torch what they mean to us.
    """
    spec = layer.passes[form] = autocast(call).spec()
    layer.record.ran(spec, SDPA.name)
    _note(layer, spec)


def form_of_method(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What tells apart calls of a method that attends, by its arguments but `self`. Calls of one
    form make the same SDPA calls, or nearly always: only counts rest on that. None where arguments
    cannot be told apart cheaply.
    """
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        return None
    form: list[Any] = [tuple(kwargs)] if kwargs else []
    for value in (*args[1:], *kwargs.values()):
        kind = type(value)
        if kind is Tensor:
            form.append((value.shape, value.dtype, value.device))
        elif value is None or kind in (bool, int, float, str):
            form.append(value)
        elif isinstance(value, nn.Module):
            form.append(id(value))
        else:
            return None
    return tuple(form)


def counted_whole(layer: PatchedLayer, form: tuple[Any, ...]) -> bool:
    """Whether a call of the method of this form was seen before: then the attention that it made
    is counted, and the method may run as it is unpatched.
    """
    specs = layer.passes_whole.get(form)
    if specs is None:
        return False
    for spec in specs:
        layer.record.ran(spec, SDPA.name)
    return True


class _Seen(threading.local):
    """The layer whose method this thread runs, and the exact calls that it made so far."""

    layer: PatchedLayer | None = None
    specs: list[AttnSpec] | None = None


_SEEN = _Seen()


def _note(layer: PatchedLayer, spec: AttnSpec) -> None:
    if _SEEN.layer is layer and _SEEN.specs is not None:
        _SEEN.specs.append(spec)


@contextmanager
def seen_whole(layer: PatchedLayer, form: tuple[Any, ...]) -> Iterator[None]:
    """While a method runs for a layer that passes: note its SDPA calls for `counted_whole`. They
    are kept only if every call that the layer counted meanwhile is among them.
    """
    before, calls = (_SEEN.layer, _SEEN.specs), layer.record.calls
    specs: list[AttnSpec] = []
    _SEEN.layer, _SEEN.specs = layer, specs
    try:
        yield
    finally:
        _SEEN.layer, _SEEN.specs = before
    # Nothing is kept of a method that made no call: it may make some the next time, as one does
    # that returned a cached result or skipped its layer.
    if specs and layer.record.calls - calls == len(specs):
        layer.passes_whole[form] = tuple(specs)
