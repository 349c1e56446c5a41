"""Processor classes of diffusers: how one reaches attention, read from its code.

Runs nothing and changes nothing; a class that diffusers adds tomorrow is classified the same way.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.nn.functional as F
from torch import nn

from sagepatch.patchers.code import reached

# Classes whose code is remembered; diffusers 0.42 has some 130 processors.
MOST_CLASSES = 1024
DISPATCH = "dispatch_attention_fn"
SDPA = "scaled_dot_product_attention"

# The model itself reads this processor's backend and expects one of diffusers' names there.
_BACKEND_READ_BY_MODEL = frozenset({"AceStepAttnProcessor2_0"})
# Some of its calls ask for the default backend whatever its own is: no handle would arrive there.
_BACKEND_NOT_PASSED_ON = frozenset({"QwenImage21AttnProcessor"})


class Route(Enum):
    """How a processor reaches attention."""

    DISPATCH = "diffusers' dispatcher, with a backend attribute that can carry a handle"
    SDPA = "torch's SDPA, directly or through a dispatcher call that carries nothing of ours"
    NONE = "something else"


@dataclass(frozen=True, slots=True)
class Way:
    """The route of one processor; `reason` says why there is none.

    With `dispatched`, torch's SDPA is reached through diffusers' dispatcher, so only while its
    backend is one that calls SDPA.
    """

    route: Route
    reason: str = ""
    dispatched: bool = False


def way_of(processor: Any) -> Way:
    """How this processor reaches attention."""
    if isinstance(processor, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return Way(Route.NONE, "the processor is a plain function, which can carry no handle")
    processor_class: type = type(processor)
    return class_way(processor_class)


def class_way(processor_class: type) -> Way:
    """How instances of a processor class reach attention, by the methods that it has now."""
    return _class_way(processor_class, methods_of(processor_class))


def methods_of(owner: type) -> tuple[types.FunctionType, ...]:
    """The functions that a class has as methods now, its own and inherited: anybody may have put
    others there since it was last looked at.
    """
    found = (getattr(owner, name, None) for name in dir(owner))
    return tuple(method for method in found if isinstance(method, types.FunctionType))


@functools.lru_cache(maxsize=MOST_CLASSES)
def _class_way(processor_class: type, methods: tuple[types.FunctionType, ...]) -> Way:
    name = processor_class.__name__
    call = call_of(processor_class)
    if call is None:
        return Way(Route.NONE, f"{name} has no Python code to follow")
    uses = _uses(call, processor_class)
    if DISPATCH in uses:
        carries = hasattr(processor_class, "_attention_backend")
        own = backend_name(processor_class)
        if own is not None or ("FLEX" in uses and not carries):
            return Way(Route.NONE, f"{name} always asks for the {own or 'flex'} backend")
        if carries and name not in _BACKEND_READ_BY_MODEL | _BACKEND_NOT_PASSED_ON:
            return Way(Route.DISPATCH)
        return Way(Route.SDPA, dispatched="NATIVE" not in uses)
    if SDPA in uses:
        return Way(Route.SDPA)
    if "super" in uses and _inherits_a_route(processor_class):
        return Way(Route.SDPA)
    if "memory_efficient_attention" in uses:
        return Way(Route.NONE, f"{name} calls xformers; switch that off to have the layer patched")
    if "apply_linear_attention" in uses or "linear" in name.lower():
        return Way(Route.NONE, f"{name} is linear attention: it has no softmax to quantise")
    if {"get_attention_scores", "softmax", "baddbmm", "bmm"} & uses:
        return Way(Route.NONE, f"{name} computes its scores by hand")
    return Way(Route.NONE, f"{name} calls neither torch's SDPA nor diffusers' dispatcher")


def call_of(processor_class: type) -> types.FunctionType | None:
    """The Python function that runs when an instance is called."""
    for owner in processor_class.__mro__:
        if owner is nn.Module:
            forward = getattr(processor_class, "forward", None)
            return forward if isinstance(forward, types.FunctionType) else None
        if "__call__" in vars(owner):
            call = vars(owner)["__call__"]
            return call if isinstance(call, types.FunctionType) else None
    return None


def backend_name(processor: Any) -> str | None:
    """The backend of diffusers that this processor was told to use; None for the default."""
    backend = getattr(processor, "_attention_backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


def elsewhere(processor: Any) -> str | None:
    """The backend that a dispatched call of this processor goes to where that is not torch's SDPA:
    its own, or the one that diffusers uses by default; None where SDPA is called.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    own = getattr(processor, "_attention_backend", None)
    active, _ = _AttentionBackendRegistry.get_active_backend()
    for backend in (active, own):
        if backend is not None:
            kernel = _AttentionBackendRegistry._backends[AttentionBackendName(backend)]
            if not any(name == SDPA for _, name in reached(inspect.unwrap(kernel), type(None))):
                return str(AttentionBackendName(backend).value)
    return None


def _uses(call: types.FunctionType, owner: type) -> frozenset[str]:
    """Names that the code reaches, with SDPA under its own name whatever a file calls it."""
    names = set()
    for function, name in reached(call, owner):
        names.add(name)
        if function.__globals__.get(name) is F.scaled_dot_product_attention:
            names.add(SDPA)
    return frozenset(names)


def _inherits_a_route(processor_class: type) -> bool:
    return any(
        base is not object and class_way(base).route is not Route.NONE
        for base in processor_class.__mro__[1:]
    )
