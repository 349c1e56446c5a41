"""Calls of layers that run exact attention: counted, and left to whoever served them unpatched.

A patched layer that a plan leaves exact should cost the host nothing worth naming.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sagepatch.backends.catalogue import SDPA
from sagepatch.functional import AUTOCAST_DEVICES, autocast
from sagepatch.layer import PatchedLayer, find_layer
from sagepatch.spec import Call


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
    return True


def remember(layer: PatchedLayer, form: tuple[Any, ...], call: Call) -> None:
    """A call of this form was served exactly, and meant to torch what it means to us."""
    layer.passes[form] = autocast(call).spec()
