"""A stand-in for one attention processor, which carries its layer's handle and reaches our op.

To diffusers it is the original: class, name, signature, state, copies and pickles. It knows nothing
of the module that holds it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sagepatch.patchers.code import reached
from sagepatch.patchers.diffusers_dispatch import over_private_globals, refresh
from sagepatch.patchers.diffusers_processors import DISPATCH, MOST_CLASSES, Route, methods_of
from sagepatch.patchers.sdpa_redirect import inside

# Where a stand-in carries its handle: diffusers passes the first on as `backend=`.
_BACKEND = "_attention_backend"
_HANDLE = "_sagepatch_handle"
_ORIGIN = "_sagepatch_origin"


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """The processor that a stand-in stands for, and its state when the stand-in was made."""

    processor: Any
    state: dict[str, Any]


def patched_copy(processor: Any, handle: Tensor, route: Route) -> Any:
    """A stand-in for `processor` whose attention goes to the layer of `handle`.

    It starts with the processor's state and shares its parameters.
    """
    before = getattr(processor, _BACKEND, None) if route is Route.DISPATCH else None
    original: type = type(processor)
    methods = methods_of(original)
    if route is Route.DISPATCH:
        refresh(methods, before)
    recreated: Any = _recreate(original, route, before, methods)
    copy: Any = recreated.__new__(recreated)
    # Past nn.Module's bookkeeping: none of ours belongs among parameters or submodules.
    vars(copy).update(vars(processor))
    vars(copy)[_ORIGIN] = _Origin(processor, dict(vars(processor)))
    vars(copy)[_BACKEND if route is Route.DISPATCH else _HANDLE] = handle
    return copy


def is_copy(processor: Any) -> bool:
    """Whether a processor is a stand-in of ours, in force or retired."""
    return _ORIGIN in getattr(processor, "__dict__", {})


def behind(processor: Any) -> Any:
    """The processor that a stand-in stands for, untouched; any other is its own original."""
    return vars(processor)[_ORIGIN].processor if is_copy(processor) else processor


def in_force(copy: Any, handle: Tensor) -> bool:
    """Whether a stand-in still leads to this handle: someone may have set a backend since."""
    return vars(copy).get(_BACKEND) is handle or vars(copy).get(_HANDLE) is handle


def original_of(processor: Any) -> Any:
    """As `behind`, brought up to date: what was set on the stand-in since (an adapter's scale, a
    mode, a backend) is set on the original.
    """
    if not is_copy(processor):
        return processor
    origin: _Origin = vars(processor)[_ORIGIN]
    state = _plain_state(processor)
    target = vars(origin.processor)
    for key in origin.state.keys() - state.keys():
        target.pop(key, None)
    for key, value in state.items():
        if key not in origin.state or origin.state[key] is not value:
            target[key] = value
    return origin.processor


def retire(copy: Any) -> None:
    """Make a stand-in behave as its original, for whoever still holds it."""
    state = _plain_state(copy)
    for key in (_BACKEND, _HANDLE):
        if key in state:
            vars(copy)[key] = state[key]
        else:
            vars(copy).pop(key, None)


def _plain_state(copy: Any) -> dict[str, Any]:
    """The state that the original would have by now: everything but what is ours."""
    state = dict(vars(copy))
    origin: _Origin = state.pop(_ORIGIN)
    state.pop(_HANDLE, None)
    if isinstance(state.get(_BACKEND), Tensor):
        del state[_BACKEND]
        if _BACKEND in origin.state:
            state[_BACKEND] = origin.state[_BACKEND]
    return state


@functools.lru_cache(maxsize=MOST_CLASSES)
def _recreate(
    original: type, route: Route, before: Any, methods: tuple[types.FunctionType, ...]
) -> type:
    body: dict[str, Any] = {
        "__class__": property(lambda self: original),
        "__reduce_ex__": _reduce_ex,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if route is Route.SDPA:
        body["__call__"] = _inside_redirect(original.__call__, original)
        body[_HANDLE] = None
    else:
        for name in dir(original):
            method = getattr(original, name, None)
            if method in methods and _dispatches(method, original):
                body[name] = over_private_globals(method, before)
    return type(original.__name__, (original,), body)


def _dispatches(method: types.FunctionType, owner: type) -> bool:
    # Only a file that imported the dispatcher can call it.
    return DISPATCH in method.__globals__ and any(
        name == DISPATCH for _, name in reached(method, owner)
    )


def _inside_redirect(call: Callable[..., Any], owner: type) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = self._sagepatch_handle
        if handle is None:
            return call(self, *args, **kwargs)
        return inside(handle, call, owner, self, *args, **kwargs)

    # diffusers reads the signature of __call__ to decide what to pass on, and Dynamo, tracing that,
    # guards on the length of this tuple.
    __call__.__defaults__ = ()
    return functools.update_wrapper(__call__, call)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Copies and pickles are the original's: unpatched, with the state of now."""
    original_class = self.__class__
    plain = original_class.__new__(original_class)
    vars(plain).update(_plain_state(self))
    return plain.__reduce_ex__(protocol)
