"""Attention processors of diffusers: how one reaches attention, and a copy of one that reaches ours
instead.

A processor class is re-created once, with its own code objects over private globals, and stays
itself to diffusers: `__class__`, signature, pickles and copies are the original's.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sagepatch.functional import run
from sagepatch.patchers.sdpa import SdpaRedirect, observed_by_others, sdpa_call

DISPATCH = "dispatch_attention_fn"
_ORIGINAL = "_sagepatch_original"
_HANDLE = "_sagepatch_handle"


class Route(Enum):
    """How a processor reaches attention."""

    DISPATCH = (
        "dispatch"  # diffusers' dispatcher, with a backend attribute that can carry our handle
    )
    SDPA = "sdpa"  # torch's SDPA, directly or through a dispatcher call without a backend
    NONE = "none"


@functools.cache
def route_of(processor_class: type) -> tuple[Route, str]:
    """How instances of a processor class reach attention; with `Route.NONE` the reason why they do
    not.
    """
    name = processor_class.__name__
    call = inspect.unwrap(processor_class.__call__)
    if not isinstance(call, types.FunctionType):
        return Route.NONE, f"{name} is not written in Python"
    reached = set(_reached(call, processor_class))
    if DISPATCH in {used for _, used in reached}:
        carries = hasattr(processor_class, "_attention_backend")
        return (Route.DISPATCH if carries else Route.SDPA), ""
    if any(
        used == "scaled_dot_product_attention"
        or function.__globals__.get(used) is F.scaled_dot_product_attention
        for function, used in reached
    ):
        return Route.SDPA, ""
    if "flex_attention" in {used for _, used in reached}:
        return Route.NONE, f"{name} uses block-sparse flex attention"
    if "xformers" in name.lower():
        return Route.NONE, f"{name} calls xformers; switch it off to patch this layer"
    if "linear" in name.lower():
        return Route.NONE, f"{name} is linear attention, which has no softmax to quantise"
    return Route.NONE, f"{name} computes its softmax by hand"


def patched_copy(processor: Any, handle: Tensor, route: Route) -> Any:
    """A stand-in for `processor` whose attention goes to the layer of `handle`; shares its state."""
    recreated = _recreate(type(processor), route)
    copy = recreated.__new__(recreated)
    copy.__dict__.update(processor.__dict__)
    # Past nn.Module's bookkeeping: neither belongs in a state dict or a list of submodules.
    copy.__dict__[_ORIGINAL] = processor
    copy.__dict__[_HANDLE] = handle
    if route is Route.DISPATCH:
        copy.__dict__["_attention_backend"] = handle
    return copy


@functools.cache
def _recreate(original: type, route: Route) -> type:
    body: dict[str, Any] = {
        "__class__": property(lambda self: original),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if route is Route.SDPA:
        body["__call__"] = _inside_redirect(original.__call__)
    else:
        body.update(_methods_over_private_globals(original))
    return type(original.__name__, (original,), body)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    import copy

    return copy.deepcopy(self.__dict__[_ORIGINAL], memo)


def _reduce_ex(self: Any, protocol: int) -> Any:
    return self.__dict__[_ORIGINAL].__reduce_ex__(protocol)


def _inside_redirect(call: Callable[..., Any]) -> Callable[..., Any]:
    # diffusers reads the signature of __call__ to decide which arguments to pass on: wraps keeps
    # it.
    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        with SdpaRedirect(self.__dict__[_HANDLE]):
            return call(self, *args, **kwargs)

    return __call__


def _methods_over_private_globals(original: type) -> dict[str, Any]:
    """The methods of `original` that dispatch attention, with globals in which the dispatcher is
    ours.

    The globals live in a module of `sys.modules` under their own `__name__`: Dynamo's guards look
    there.
    """
    rebuilt: dict[str, Any] = {}
    namespaces: dict[str, dict[str, Any]] = {}
    for owner in reversed(original.__mro__):
        for name, method in vars(owner).items():
            if not isinstance(method, types.FunctionType):
                continue
            if DISPATCH in {used for _, used in _reached(method, original)}:
                source = method.__globals__
                key = source["__name__"]
                if key not in namespaces:
                    namespaces[key] = _private_globals(source, f"{key}.{original.__qualname__}")
                rebuilt[name] = _over(method, namespaces[key])
    return rebuilt


def _private_globals(source: dict[str, Any], name: str) -> dict[str, Any]:
    module = types.ModuleType(f"sagepatch.patched.{name}")
    namespace = module.__dict__
    namespace.update({key: value for key, value in source.items() if key != "__name__"})
    plain = source[DISPATCH]
    namespace[DISPATCH] = functools.wraps(plain)(_dispatcher(plain))
    for key, value in source.items():
        own = isinstance(value, types.FunctionType) and value.__globals__ is source
        if own and key != DISPATCH and DISPATCH in set(_names(value.__code__)):
            namespace[key] = _over(value, namespace)
    sys.modules[module.__name__] = module
    return namespace


def _over(function: types.FunctionType, namespace: dict[str, Any]) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__dict__.update(function.__dict__)
    return copy


def _dispatcher(plain: Callable[..., Any]) -> Callable[..., Any]:
    """diffusers' dispatcher as a patched processor sees it: our layers' handles arrive as
    `backend`.
    """

    def dispatch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Any:
        handle = backend if isinstance(backend, Tensor) else None
        call = None
        if handle is not None:
            backend = None
            sparse = attn_mask is not None and not isinstance(attn_mask, Tensor)
            if not (sparse or attention_kwargs or parallel_config or observed_by_others()):
                # [B, S, H, D] here, [B, H, S, D] inside.
                call = sdpa_call(
                    query.transpose(1, 2),
                    key.transpose(1, 2),
                    value.transpose(1, 2),
                    attn_mask,
                    dropout_p,
                    is_causal,
                    scale,
                    enable_gqa,
                )
        if handle is None or call is None:
            return plain(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                attention_kwargs,
                backend=backend,
                parallel_config=parallel_config,
            )
        return run(call, handle=handle)[0].transpose(1, 2)

    return dispatch


def _reached(
    function: types.FunctionType, owner: type, depth: int = 2
) -> Iterator[tuple[types.FunctionType, str]]:
    """(function, name it uses) for a method and for what it calls in the same file or on the same
    class.
    """
    for name in _names(function.__code__):
        yield function, name
        if depth == 0:
            continue
        for value in (function.__globals__.get(name), getattr(owner, name, None)):
            nested = isinstance(value, types.FunctionType) and value is not function
            if nested and value.__module__ == function.__module__:
                yield from _reached(value, owner, depth - 1)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
