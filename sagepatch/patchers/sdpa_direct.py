"""A function that calls torch's SDPA by a global name, run over globals where that call is ours.

What a `TorchFunctionMode` does, for a fraction of the time: a mode sees every operation of torch,
twenty or so around one attention. Nobody's module changes, and no other call of SDPA is met.
"""

from __future__ import annotations

import dis
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sagepatch.patchers.code import names_in, reached

SDPA = "scaled_dot_product_attention"
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


@functools.lru_cache(maxsize=4096)
def direct(function: Any, owner: type) -> types.FunctionType | None:
    """A copy of `function`, a method of `owner`, whose own calls of torch's SDPA are met.

    None where a mode is needed: helpers that call it, decorators, ways to reach it that globals do
    not show.
    """
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return None
    callers = {
        caller
        for caller, name in reached(function, owner)
        if name == SDPA or caller.__globals__.get(name) is F.scaled_dot_product_attention
    }
    if callers != {function} or _writes_globals(function.__code__):
        return None
    source = function.__globals__
    met: dict[str, Any] = {}
    for name in _global_names(function.__code__):
        value = source.get(name)
        if value is F:
            met[name] = _FUNCTIONAL
        elif value is F.scaled_dot_product_attention:
            met[name] = _attention
        elif value is torch and "functional" in names_in(function.__code__):
            # torch.nn.functional.scaled_dot_product_attention may be meant.
            return None
    if not met:
        return None
    copy = types.FunctionType(
        function.__code__,
        _Globals(source, met),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Globals(dict[str, Any]):
    """The globals of a module as they are at each moment, but for a few names."""

    def __init__(self, source: dict[str, Any], met: dict[str, Any]) -> None:
        super().__init__(met, __builtins__=source["__builtins__"], __name__=source["__name__"])
        self._source = source

    def __missing__(self, name: str) -> Any:
        return self._source[name]


class _Functional(types.ModuleType):
    """`torch.nn.functional`, with another SDPA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


def _attention(*args: Any, **kwargs: Any) -> Any:
    handle, answer = _HERE.handle, _HERE.answer
    if handle is None or answer is None:
        return F.scaled_dot_product_attention(*args, **kwargs)
    return answer(handle, args, kwargs)


_FUNCTIONAL = _Functional(F.__name__)
vars(_FUNCTIONAL)[SDPA] = _attention


def _global_names(code: types.CodeType) -> set[str]:
    """Names that a code object and those inside it load as globals."""
    return {
        instruction.argval
        for own in _with_nested(code)
        for instruction in dis.get_instructions(own)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _writes_globals(code: types.CodeType) -> bool:
    return any(
        instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
        for own in _with_nested(code)
        for instruction in dis.get_instructions(own)
    )


def _with_nested(code: types.CodeType) -> list[types.CodeType]:
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [code, *(inner for own in nested for inner in _with_nested(own))]
