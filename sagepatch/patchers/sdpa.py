"""Modules that call torch's SDPA in their own forward: finds them, and redirects that one call.

Nothing of torch changes: a module's method runs over globals whose SDPA is ours (`sdpa_direct`), or
inside a `TorchFunctionMode` that sees the SDPA calls made there. Knows neither diffusers nor
transformers.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from sagepatch.functional import AUTOCAST_DEVICES, needs_grad, run
from sagepatch.layer import PatchedLayer, SiteKind
from sagepatch.patchers.carrier import ATTRIBUTE, Carrier, count_elsewhere, recomputed_later
from sagepatch.patchers.code import (
    calls,
    calls_sdpa,
    compares_implementation,
    multiplies,
    takes_softmax,
    uses_attention_interface,
)
from sagepatch.patchers.passing import counted, form_of, passing, remember
from sagepatch.patchers.sdpa_direct import GENUINE, call_directly, direct
from sagepatch.patchers.site import Found, Left, Site, Swap
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
    else:
        out = run(call, handle=handle)[0]
        if layer is not None and form is not None:
            remember(layer, form, call)
        return out
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
    """`method(*args, **kwargs)`, a method of `owner`, with its SDPA calls sent to this layer."""
    if not torch.compiler.is_compiling():
        copy = direct(method, owner)
        if copy is not None:
            return call_directly(copy, handle, answer, args, kwargs)
    with SdpaRedirect(handle):
        return method(*args, **kwargs)


def observed_by_others() -> bool:
    """Whether someone else's function mode waits for SDPA, as guidance by skipped scores does."""
    return any(
        not isinstance(mode, SdpaRedirect | DeviceContext)
        for mode in _get_current_function_mode_stack()
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
    if query.is_nested or not all(type(t) in (Tensor, nn.Parameter) for t in (query, key, value)):
        return SUBCLASS
    if not query.dim() == key.dim() == value.dim() == 4:
        return RANK
    if dropout_p != 0.0:
        return DROPOUT
    if not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool):
        return OPTIONS
    if scale is not None and not abs(scale) < math.inf:
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


def find(model: nn.Module, prefix: str) -> Found:
    """Every module of `model` whose own forward calls SDPA, and those that are left, with why."""
    sites: list[Site] = []
    left: list[Left] = []
    for name, module in named_modules(model, prefix):
        kind = kind_of(name, module)
        reason = _why_left(module)
        if reason is not None:
            left.append(Left(name, kind, reason))
        elif calls_sdpa(type(module)) and not uses_attention_interface(type(module)):
            sites.append(Site(name, kind, module, "sdpa", functools.partial(install, module)))
    return Found(tuple(sites), tuple(left))


def named_modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` with their full path: prefix, a dot, the path inside the model.

    `torch.compile`'s wrapper is no part of a name, so a plan fits a model compiled or not.
    """
    for name, module in model.named_modules():
        if "_orig_mod" not in module._modules:
            steps = (step for step in name.split(".") if step != "_orig_mod")
            yield ".".join(filter(None, (prefix, *steps))), module


def _why_left(module: nn.Module) -> str | None:
    owner = type(module)
    if isinstance(module, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention keeps its own fused path"
    if uses_attention_interface(owner):
        return None
    if inspect.isgeneratorfunction(owner.forward) or inspect.iscoroutinefunction(owner.forward):
        return f"{owner.__name__}.forward is a generator or coroutine, which runs after its call"
    if not calls_sdpa(owner):
        return _own_way(owner) if named_attention(module) else None
    if getattr(module, "fused_attn", True) is False:
        return "fused_attn is off, so it computes its softmax by hand"
    named = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if named != "sdpa" and compares_implementation(owner):
        return f"it runs {named}; load the model with attn_implementation='sdpa' to patch it"
    return None


def _own_way(owner: type) -> str | None:
    """How a class that is called attention computes it itself; None where it only calls another."""
    if takes_softmax(owner):
        return f"{owner.__name__} computes its softmax by hand"
    if calls(owner, "multi_head_attention_forward"):
        return f"{owner.__name__} calls torch's multi_head_attention_forward, a fused path"
    if calls(owner, "_flash_attention_forward"):
        return f"{owner.__name__} calls flash attention; load with attn_implementation='sdpa'"
    if multiplies(owner):
        return f"{owner.__name__} attends in a way of its own: no softmax, no call of SDPA"
    return None


def named_attention(module: nn.Module) -> bool:
    """Whether the module's class says that it is attention."""
    name = type(module).__name__.lower()
    return any(word in name for word in ("attention", "attn", "mhsa", "gpsa", "shsa"))


def kind_of(name: str, module: nn.Module) -> SiteKind:
    """Cross where the module says so by flag, class or place in the model; self otherwise."""
    words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
    crosses = getattr(module, "is_cross_attention", False) or any(
        word in words for word in ("cross", "encdec", "encoder_attn")
    )
    return "cross" if crosses else "self"


def install(module: nn.Module, layer: PatchedLayer) -> Swap:
    """Run the forward of this one instance inside `SdpaRedirect`, under hooks that came before.

    A method of an earlier patch that is still there, be it under hooks that came later, serves the
    new one: a second would lead back to it.
    """
    earlier = _method_of_ours(module)
    if earlier is not None:
        ours = earlier
        left = module.__dict__.get(ATTRIBUTE)
        before = None if left is None else left.inner
        carrier = Carrier(layer.handle, before)
    else:
        # accelerate's hooks keep the forward that they wrap in `_old_forward`: go under them, so
        # that taking them off leaves us on.
        slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
        before = module.__dict__.get(slot)
        plain = before is None or getattr(before, "__func__", None) is type(module).forward
        carrier = Carrier(layer.handle, None if plain else before)
        ours = types.MethodType(_redirected, module)
        setattr(module, slot, ours)
    setattr(module, ATTRIBUTE, carrier)
    for name, method in _ON_COPYING.items():
        module.__dict__[name] = types.MethodType(method, module)

    def undo() -> None:
        if module.__dict__.get(ATTRIBUTE) is not carrier:
            return
        here = next(
            (s for s in ("forward", "_old_forward") if module.__dict__.get(s) is ours), None
        )
        if here is None and carrier.inner is not None and _reaches(module.forward, ours):
            # Under someone else's wrapper, and over another: stay as a pass-through.
            carrier.handle = None
            return
        delattr(module, ATTRIBUTE)
        for name in _ON_COPYING:
            module.__dict__.pop(name, None)
        if here is None:
            return
        if here == "forward" and before is None:
            del module.forward
        else:
            setattr(module, here, before or types.MethodType(type(module).forward, module))

    def replaced_by() -> str | None:
        if module.__dict__.get(ATTRIBUTE) is not carrier:
            return "another patch"
        if module.__dict__.get("_old_forward") is ours or _reaches(module.forward, ours):
            return None
        return getattr(module.forward, "__qualname__", type(module.forward).__name__)

    return Swap(undo, replaced_by)


def _redirected(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # A function bound to the instance, its handle an attribute: compiled blocks stay one graph.
    carrier = getattr(self, ATTRIBUTE, None)
    if carrier is None:
        return type(self).forward(self, *args, **kwargs)
    if carrier.handle is None:
        return carrier.inner(*args, **kwargs)
    if recomputed_later(self):
        count_elsewhere(carrier.handle, TRAINING)
        return (carrier.inner or functools.partial(type(self).forward, self))(*args, **kwargs)
    if carrier.inner is None:
        owner = type(self)
        return inside(carrier.handle, owner.forward, owner, self, *args, **kwargs)
    # Entered already: what the instance had as forward led back to an earlier method of ours.
    plain = _entered(carrier.handle)
    with SdpaRedirect(carrier.handle):
        if plain:
            return type(self).forward(self, *args, **kwargs)
        return carrier.inner(*args, **kwargs)


# A bound method pickles as getattr(instance, name): with this name a copy gets its class's forward.
_redirected.__name__ = "forward"


def _state_of_a_copy(self: nn.Module) -> Any:
    """What copies and pickles of this instance take along: all but the patch. A method is bound to
    the instance, so that a shallow copy would run the original's weights.
    """
    state = type(self).__getstate__(self)
    if not isinstance(state, dict):
        return state
    state = {
        name: value
        for name, value in state.items()
        if not name.startswith(ATTRIBUTE) and name not in _ON_COPYING
    }
    carrier = getattr(self, ATTRIBUTE, None)
    for slot in _slots_of_ours(self):
        inner = None if carrier is None else carrier.inner
        if inner is None and slot == "forward":
            del state[slot]
        else:
            state[slot] = inner or types.MethodType(type(self).forward, self)
    return state


def _replica(self: nn.Module) -> nn.Module:
    """A replica of `nn.DataParallel`, of the same layer: it attends by its own method, over its own
    weights.
    """
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)
    for slot in _slots_of_ours(self):
        replica.__dict__[slot] = types.MethodType(_redirected, replica)
    for name in _ON_COPYING:
        del replica.__dict__[name]
    return replica


# `copy`, `pickle` and `nn.DataParallel` ask the instance for these.
_ON_COPYING = {"__getstate__": _state_of_a_copy, "_replicate_for_data_parallel": _replica}


def _slots_of_ours(module: nn.Module) -> list[str]:
    """Where this instance holds its method of ours."""
    found = ((slot, module.__dict__.get(slot)) for slot in ("forward", "_old_forward"))
    return [
        slot
        for slot, method in found
        if isinstance(method, types.MethodType) and method.__func__ is _redirected
    ]


def _entered(handle: Tensor) -> bool:
    return any(
        isinstance(mode, SdpaRedirect) and mode.handle is handle
        for mode in _get_current_function_mode_stack()
    )


def _method_of_ours(module: nn.Module) -> types.MethodType | None:
    """The method that a patch once gave this instance, if a call of it still comes by there."""
    # accelerate's wrapper calls what stands in `_old_forward`, whatever it says that it wraps.
    slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    for layer in _wrapped(module.__dict__.get(slot)):
        if isinstance(layer, types.MethodType) and layer.__func__ is _redirected:
            return layer if layer.__self__ is module else None
    return None


def _reaches(forward: Any, ours: types.MethodType) -> bool:
    return any(layer is ours for layer in _wrapped(forward))


def _wrapped(forward: Any) -> Iterator[Any]:
    """A forward and what it wraps, from outside in, as far as wrappers say."""
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def _agree(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    Hq, Hkv = query.shape[1], key.shape[1]
    same_dtype = query.dtype == key.dtype == value.dtype
    return (
        query.device == key.device == value.device
        and (same_dtype or _autocasts(query.device.type))
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
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
