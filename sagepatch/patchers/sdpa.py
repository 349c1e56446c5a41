"""Modules that call torch's SDPA in their own forward: finds them, and has each instance run its
method with that call sent to us (`sdpa_redirect`). Knows neither diffusers nor transformers.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

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
from sagepatch.patchers.sdpa_redirect import TRAINING, SdpaRedirect, inside
from sagepatch.patchers.site import Found, Left, Site, Swap


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
    # If this layer's redirect is entered already, the forward that the instance had led back here
    # through an earlier method of ours: end that by calling the class's forward.
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
