"""One SDPA call as a layer answers it, and the ways to reach it from a method: the method's code
over globals whose SDPA is ours (`sdpa_direct`), or a `TorchFunctionMode` entered around it.

Nothing of torch changes. Knows no module, neither diffusers nor transformers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from sagepatch.functional import AUTOCAST_DEVICES, needs_grad, run
from sagepatch.patchers.carrier import count_elsewhere
from sagepatch.patchers.passing import (
    counted,
    counted_whole,
    form_of,
    form_of_method,
    passing,
    remember,
    seen_whole,
)
from sagepatch.patchers.sdpa_direct import GENUINE, call_directly, direct
from sagepatch.spec import Call

OBSERVED = "another TorchFunctionMode is active and must see the SDPA call"
TRAINING = "training: gradients need the original call"
DROPOUT = "training: dropout needs the original call"
SUBCLASS = "q, k or v is a nested tensor or another tensor subclass"
RANK = "q, k and v are not 4-dimensional"
MASK = "the mask is given together with is_causal, or is of integers or of a shape of its own"
OPTIONS = "is_causal, enable_gqa or scale is of a kind that torch may complain of"
SHAPES = "q, k and v differ in batch, heads, dtype or device as only torch's SDPA may allow"


class SdpaRedirect(TorchFunctionMode):
    """While entered, sends `F.scaled_dot_product_attention` to the layer with this handle.

    Calls that no kernel of ours could mean the same by stay torch's own, arguments untouched:
    dropout, a mask together with `is_causal`, integer masks, other ranks than 4, tensor subclasses,
    gradients, and shapes or dtypes that torch itself should complain about.
    """

    def __init__(self, handle: Tensor) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # Written in Python over super(), which Dynamo does not follow under a function mode.
            return torch.unflatten(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        if func is not GENUINE or (not compiling and _LEFT.to_torch):
            return func(*args, **kwargs)
        return answer(self.handle, args, kwargs)


def answer(handle: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `F.scaled_dot_product_attention(*args, **kwargs)` gives in the layer of `handle`."""
    layer = passing(handle)
    form = None if layer is None else form_of(*args, **kwargs)
    if layer is not None and form is not None and counted(layer, form):
        return GENUINE(*args, **kwargs)
    call = sdpa_call(*args, **kwargs)
    if isinstance(call, str):
        reason = call
    elif observed_by_others():
        reason = OBSERVED
    elif needs_grad(call):
        reason = TRAINING
    elif layer is not None and form is not None:
        remember(layer, form, call)
        return GENUINE(*args, **kwargs)
    else:
        return run(call, handle=handle)[0]
    count_elsewhere(handle, reason)
    if torch.compiler.is_compiling():
        return GENUINE(*args, **kwargs)
    # A layer around this one would take the call for its own.
    before, _LEFT.to_torch = _LEFT.to_torch, True
    try:
        return GENUINE(*args, **kwargs)
    finally:
        _LEFT.to_torch = before


class _Left(threading.local):
    """Whether this thread is in an SDPA call that a layer has left to torch."""

    to_torch = False


_LEFT = _Left()


def inside(
    handle: Tensor, method: Callable[..., Any], owner: type, *args: Any, **kwargs: Any
) -> Any:
    """`method(*args, **kwargs)`, a method of `owner`, with its SDPA calls sent to this layer; as it
    is where the layer runs exact attention and has seen such a call.
    """
    if torch.compiler.is_compiling():
        return _redirected(handle, method, owner, args, kwargs)
    layer = passing(handle)
    form = None if layer is None else form_of_method(args, kwargs)
    if layer is None or form is None:
        return _redirected(handle, method, owner, args, kwargs)
    if counted_whole(layer, form):
        return method(*args, **kwargs)
    with seen_whole(layer, form):
        return _redirected(handle, method, owner, args, kwargs)


def _redirected(
    handle: Tensor,
    method: Callable[..., Any],
    owner: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not torch.compiler.is_compiling():
        copy = direct(method, owner)
        if copy is not None:
            return call_directly(copy, handle, answer, args, kwargs)
    with SdpaRedirect(handle):
        return method(*args, **kwargs)


def observed_by_others() -> bool:
    """Whether someone else's function mode waits for SDPA, as guidance by skipped scores does."""
    others = [
        mode
        for mode in _get_current_function_mode_stack()
        if not isinstance(mode, SdpaRedirect | DeviceContext)
    ]
    if others and torch.compiler.is_exporting():
        # An export's own modes write down whatever operation comes.
        return not all(type(mode).__module__.startswith("torch.") for mode in others)
    return bool(others)


def plain_types(*tensors: Any) -> bool:
    """Whether these are tensors and nothing that only behaves like one; of an export, its fakes."""
    return all(
        type(t) in (Tensor, nn.Parameter)
        or (type(t) is FakeTensor and torch.compiler.is_exporting())
        for t in tensors
    )


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call | str:
    """An SDPA call as ours, or why only torch's own function means the same (or should raise)."""
    # Their types first: a tracer's stand-in for a tensor answers no question.
    if not plain_types(query, key, value) or query.is_nested:
        return SUBCLASS
    if not query.dim() == key.dim() == value.dim() == 4:
        return RANK
    if dropout_p != 0.0:
        return DROPOUT
    if not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool):
        return OPTIONS
    if isinstance(scale, Tensor) or (scale is not None and not abs(scale) < math.inf):
        return OPTIONS
    if not _agree(query, key, value, enable_gqa):
        return SHAPES
    if attn_mask is not None and (is_causal or not _fits(attn_mask, query, key)):
        return MASK
    return Call(
        query,
        key,
        value,
        1 / math.sqrt(query.shape[3]) if scale is None else scale,
        attn_mask,
        0 if is_causal else None,
        # Callers of SDPA merge the heads next (transpose, reshape): this order makes that free.
        bshd_out=True,
    )


def _agree(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    Hq, Hkv = query.shape[1], key.shape[1]
    same_dtype = query.dtype == key.dtype == value.dtype
    return (
        query.device == key.device == value.device
        and (same_dtype or _autocasts(query.device.type))
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3] > 0
        and key.shape[:3] == value.shape[:3]
        # One key head for all serves without `enable_gqa` too: SDPA broadcasts it.
        and (Hq == Hkv or Hkv == 1 or (enable_gqa and Hkv > 0 and Hq % Hkv == 0))
    )


def _autocasts(device: str) -> bool:
    return device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device)


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) or mask.device != query.device:
        return False
    target = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return 2 <= mask.dim() <= 4 and all(
        have in (1, want)
        for have, want in zip(reversed(mask.shape), reversed(target), strict=False)
    )
