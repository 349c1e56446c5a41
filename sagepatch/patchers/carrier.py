"""What a patched module carries: its layer's handle, in a holder that copies and pickles as None.

Knows no framework: a patcher hangs a `Carrier` on one instance and reads it in the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from sagepatch.backends.catalogue import SDPA
from sagepatch.errors import StrictFallback
from sagepatch.layer import find_layer

ATTRIBUTE = "_sagepatch"


class Carrier:
    """The handle of one patched instance; `inner` is a forward that the instance had of its own.

    A deep or pickled copy of the instance gets None here, so it is unpatched and nobody's count.
    """

    __slots__ = ("handle", "inner")

    def __init__(self, handle: Tensor | None, inner: Callable[..., Any] | None = None) -> None:
        self.handle = handle
        self.inner = inner

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def carried(module: nn.Module) -> Tensor | None:
    """The handle that this instance carries; None for an unpatched one."""
    carrier = getattr(module, ATTRIBUTE, None)
    return None if carrier is None else carrier.handle


def recomputed_later(module: nn.Module) -> bool:
    """Whether this call runs inside a reentrant activation checkpoint: first without gradients,
    later again with them, and both must be the same forward. Never in compiled code.
    """
    if not module.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    checkpoint = CheckpointFunction.forward.__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not checkpoint:
        frame = frame.f_back
    return frame is not None


def count_elsewhere(handle: Tensor, reason: str) -> None:
    """Count a call of a patched layer that will run outside the op, and why; not in compiled code.

    Raises `StrictFallback` under `strict=True` where the layer has a kernel that it would not run.
    """
    if torch.compiler.is_compiling():
        return
    layer = find_layer(handle)
    if layer is not None:
        wish = layer.request.variant
        if layer.policy.strict and wish != "exact":
            raise StrictFallback(layer.name, wish, [reason])
        layer.record.calls += 1
        layer.record.by_variant[SDPA.name] += 1
        layer.record.fell_back(reason)
