"""A stand-in for one attention processor, which reaches our op.

To diffusers it is the original: class, name, signature, state, copies and pickles. It knows nothing
of models. A stand-in that calls torch's SDPA serves the layer of whichever module calls it. One
that calls diffusers' dispatcher carries the handle of one layer itself: the dispatcher is passed
an attribute of the processor, and nothing of the module.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sagepatch.layer import find_layer
from sagepatch.patchers.carrier import carried, count_elsewhere, recomputed_later
from sagepatch.patchers.code import reached
from sagepatch.patchers.diffusers_dispatch import over_private_globals, refresh
from sagepatch.patchers.diffusers_processors import DISPATCH, MOST_CLASSES, Route, methods_of
from sagepatch.patchers.sdpa_redirect import TRAINING, inside

# Where a dispatching stand-in carries its handle: diffusers passes it on as `backend=`.
_BACKEND = "_attention_backend"
_ORIGIN = "_sagepatch_origin"


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """The processor that a stand-in stands for, and its state when the stand-in was made."""

    processor: Any
    state: dict[str, Any]


def patched_copy(processor: Any, handle: Tensor, route: Route) -> Any:
    """A stand-in for `processor` whose attention goes to the layer of `handle`, or to that of the
    module that calls it.

    The latter shares the processor's state: what is set on one is set on the other, and on every
    stand-in of a processor of many layers. The former begins with its state.
    """
    dispatches = route is Route.DISPATCH
    before = getattr(processor, _BACKEND, None) if dispatches else None
    original: type = type(processor)
    methods = methods_of(original)
    if dispatches:
        refresh(methods, before)
    recreated: Any = _recreate(original, route, before, methods)
    copy: Any = recreated.__new__(recreated)
    state = vars(processor)
    # Past nn.Module's bookkeeping: none of ours belongs among parameters or submodules.
    object.__setattr__(copy, "__dict__", {**state, _BACKEND: handle} if dispatches else state)
    object.__setattr__(copy, _ORIGIN, _Origin(processor, dict(state)))
    return copy


def is_copy(processor: Any) -> bool:
    """Whether a processor is a stand-in of ours, in force or retired."""
    return _ORIGIN in vars(type(processor))


def behind(processor: Any) -> Any:
    """The processor that a stand-in stands for, untouched; any other is its own original."""
    return _origin(processor).processor if is_copy(processor) else processor


def in_force(copy: Any, module: nn.Module, handle: Tensor) -> bool:
    """Whether a stand-in that `module` calls leads to this handle: someone may have set a backend
    since.
    """
    return (vars(copy).get(_BACKEND) if _has_own_state(copy) else carried(module)) is handle


def strays(processor: Any, module: nn.Module) -> bool:
    """Whether what `module` calls is the stand-in of another layer, moved here by its user, or of a
    patch that was taken back.
    """
    if not is_copy(processor):
        return False
    if not _has_own_state(processor):
        return carried(module) is None
    handle = vars(processor).get(_BACKEND)
    layer = find_layer(handle) if isinstance(handle, Tensor) else None
    return layer is None or layer.module() is not module


def original_of(processor: Any) -> Any:
    """As `behind`, brought up to date: what was set on the stand-in since (an adapter's scale, a
    mode, a backend) is set on the original.
    """
    original = behind(processor)
    if original is processor or not _has_own_state(processor):
        return original
    before, state, target = _origin(processor).state, _plain_state(processor), vars(original)
    for key in before.keys() - state.keys():
        target.pop(key, None)
    for key, value in state.items():
        if key not in before or before[key] is not value:
            target[key] = value
    return original


def retire(copy: Any) -> None:
    """Make a stand-in behave as its original, for whoever still holds it."""
    if _has_own_state(copy):
        state = _plain_state(copy)
        if _BACKEND in state:
            vars(copy)[_BACKEND] = state[_BACKEND]
        else:
            vars(copy).pop(_BACKEND, None)


def _origin(copy: Any) -> _Origin:
    found: _Origin = getattr(copy, _ORIGIN)
    return found


def _has_own_state(copy: Any) -> bool:
    return vars(copy) is not vars(_origin(copy).processor)


def _plain_state(copy: Any) -> dict[str, Any]:
    """The state that the original would have by now: everything but what is ours."""
    state = dict(vars(copy))
    if isinstance(state.get(_BACKEND), Tensor):
        del state[_BACKEND]
        before = _origin(copy).state
        if _BACKEND in before:
            state[_BACKEND] = before[_BACKEND]
    return state


@functools.lru_cache(maxsize=MOST_CLASSES)
def _recreate(
    original: type, route: Route, before: Any, methods: tuple[types.FunctionType, ...]
) -> type:
    body: dict[str, Any] = {
        "__slots__": (_ORIGIN,),
        "__class__": property(lambda self: original),
        "__reduce_ex__": _reduce_ex,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    if route is Route.SDPA:
        body["__call__"] = _inside_redirect(original.__call__, original)
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
    def __call__(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        handle = carried(attn)
        if handle is None:
            return call(self, attn, *args, **kwargs)
        if recomputed_later(attn):
            count_elsewhere(handle, TRAINING)
            return call(self, attn, *args, **kwargs)
        return inside(handle, call, owner, self, attn, *args, **kwargs)

    # diffusers reads the signature of __call__ to decide what to pass on. Dynamo, tracing that,
    # sees the original's defaults and guards on what it finds here. `attn` is always given.
    __call__.__defaults__ = getattr(call, "__defaults__", None) or ()
    __call__.__kwdefaults__ = getattr(call, "__kwdefaults__", None)
    functools.update_wrapper(__call__, call)
    # Found once, not at each of its calls.
    __call__.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return __call__


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """Copies and pickles are the original's: unpatched, with the state of now."""
    original_class = self.__class__
    plain = original_class.__new__(original_class)
    vars(plain).update(_plain_state(self))
    return plain.__reduce_ex__(protocol)
