"""A function that calls torch's SDPA by a global name, run over globals where that call is ours.

What a `TorchFunctionMode` does, for a fraction of the time: a mode sees every operation of torch,
twenty or so around one attention. Nobody's module changes, and no other call of SDPA is met.
"""

from __future__ import annotations

import dis
import threading
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from sagepatch.patchers.code import names_in, reached

SDPA = "scaled_dot_product_attention"
# What `F` has under that name, unless somebody put a wrapper there.
GENUINE = torch._C._nn.scaled_dot_product_attention
# Takes the handle and the call's arguments, and answers for torch's SDPA.
Answer = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Any]


class _Here(threading.local):
    """Whose function this thread runs."""

    handle: Tensor | None = None
    answer: Answer | None = None


_HERE = _Here()


def call_directly(
    function: types.FunctionType,
    handle: Tensor,
    answer: Answer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a copy that `direct` made, its SDPA calls answered for the layer of `handle`."""
    before = _HERE.handle, _HERE.answer
    _HERE.handle, _HERE.answer = handle, answer
    try:
        return function(*args, **kwargs)
    finally:
        _HERE.handle, _HERE.answer = before


def direct(function: Any, owner: type) -> types.FunctionType | None:
    """A copy of `function`, a method of `owner`, whose own calls of torch's SDPA are met.

    None where a mode is needed: where code does not show that every SDPA call of the function is
    its own, by `F.` or by name, or where those names mean something else by now.
    """
    if type(function) is not types.FunctionType or F.scaled_dot_product_attention is not GENUINE:
        return None
    known = _NAMES.get(owner)
    if known is None:
        known = _NAMES[owner] = {}
    code = function.__code__
    try:
        names = known[code]
    except KeyError:
        names = known[code] = _names_to_meet(function, owner)
    if names is None:
        return None
    source = function.__globals__
    met: dict[str, Any] = {}
    for name in names:
        value = source.get(name)
        if value is F:
            met[name] = _FUNCTIONAL
        elif value is GENUINE:
            met[name] = _attention
        else:
            return None
    # Made anew for each call, which takes two microseconds: so every name means what it means at
    # that moment, and nobody's module is kept alive. Python notes in `__warningregistry__` which
    # warnings a file has given: the copy shares that dictionary with the original.
    source.setdefault("__warningregistry__", {})
    copy = types.FunctionType(code, source | met, code.co_name, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# By class, and code of its methods: the globals to replace; None for code that needs a mode.
_NAMES: WeakKeyDictionary[type, dict[types.CodeType, tuple[str, ...] | None]] = WeakKeyDictionary()
# Functions that look at globals other than by a name in the code.
_LOOKERS = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "__import__", "_getframe", "currentframe")
)
_NEEDS_GLOBALS = frozenset(
    (
        *("LOAD_NAME", "LOAD_BUILD_CLASS", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME"),
        *("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_SUPER_ATTR"),
    )
)


def _names_to_meet(function: types.FunctionType, owner: type) -> tuple[str, ...] | None:
    source, code = function.__globals__, function.__code__
    callers = {
        caller
        for caller, name in reached(function, owner)
        if name == SDPA or caller.__globals__.get(name) is GENUINE
    }
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    names = set(names_in(code))
    methods = (getattr(owner, name, None) for name in names)
    if (
        callers != {function}
        or hasattr(function, "__wrapped__")
        or function.__closure__
        or any(callable(value) or isinstance(value, types.ModuleType) for value in given)
        or any(_elsewhere(method) and method is not function for method in methods)
        or names & {*_LOOKERS, "super"}
    ):
        return None
    met: dict[str, None] = {}
    for own in _with_nested(code):
        before = None
        for step in dis.get_instructions(own):
            loaded = source.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
            if step.opname in _NEEDS_GLOBALS:
                return None
            # By another way than F: torch.nn.functional, a module of compatibility, an object.
            looked_up = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before is not F
            if looked_up and (
                step.argval == SDPA or _elsewhere(getattr(before, step.argval, None))
            ):
                return None
            if loaded is F or (loaded is not None and loaded is GENUINE):
                met[step.argval] = None
            elif _elsewhere(loaded):
                return None
            before = loaded
    return tuple(met) or None


def _elsewhere(value: Any) -> bool:
    """Whether this is a function that calls torch's SDPA itself, from whatever file."""
    return isinstance(value, types.FunctionType) and SDPA in names_in(value.__code__)


class _Functional(types.ModuleType):
    """`torch.nn.functional`, with another SDPA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


def _attention(*args: Any, **kwargs: Any) -> Any:
    handle, answer = _HERE.handle, _HERE.answer
    if handle is None or answer is None:
        return GENUINE(*args, **kwargs)
    return answer(handle, args, kwargs)


_FUNCTIONAL = _Functional(F.__name__)
vars(_FUNCTIONAL)[SDPA] = _attention


def _with_nested(code: types.CodeType) -> list[types.CodeType]:
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [code, *(inner for own in nested for inner in _with_nested(own))]
