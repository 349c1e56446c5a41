"""What a module's forward does, read from its code object: whether it calls SDPA, takes a softmax
itself, asks for an attention function by name or weighs values in some other way. Runs nothing and
knows no framework.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F

# How deep to follow functions and methods of the same file: forward -> _attn -> compute.
_DEPTH = 3
# Ways to weigh values without a softmax that code shows: products, and kernels behind autograd.
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "apply"})


def calls_sdpa(owner: type) -> bool:
    """Whether the forward of a module class calls torch's SDPA, itself, in a helper or by the
    forward of a class that it inherits from.
    """
    own = any(
        name == "scaled_dot_product_attention"
        or function.__globals__.get(name) is F.scaled_dot_product_attention
        for function, name in _reached(owner)
    )
    return own or any(calls_sdpa(base) for base in _asked_by_super(owner))


def takes_softmax(owner: type) -> bool:
    """Whether the forward of a module class computes a softmax, itself or in a helper."""
    return any(name in ("softmax", "baddbmm", "Softmax") for _, name in _reached(owner))


def uses_attention_interface(owner: type) -> bool:
    """Whether the forward of a module class asks for its attention function by configured name."""
    names = {name for _, name in _reached(owner, depth=1)}
    # Asked by `get_interface` or by index. getattr(ALL_ATTENTION_FUNCTIONS, name, eager) does not
    # count: names are no attributes, so it always gives eager.
    return "get_interface" in names or (
        "ALL_ATTENTION_FUNCTIONS" in names and "getattr" not in names
    )


def calls(owner: type, function: str) -> bool:
    """Whether the forward of a module class uses this name, itself or in a helper."""
    return any(name == function for _, name in _reached(owner))


def multiplies(owner: type) -> bool:
    """Whether the forward of a module class multiplies tensors, samples or runs a kernel itself:
    what an attention of its own kind does, and one that only calls another does not.
    """
    return any(
        name in _PRODUCTS or _takes_product(function.__code__) for function, name in _reached(owner)
    )


def own_forward(owner: type) -> types.FunctionType | None:
    """The Python function behind a class's forward, without its decorators."""
    function = inspect.unwrap(getattr(owner, "forward", None) or _absent)
    return function if isinstance(function, types.FunctionType) else None


def names_in(code: types.CodeType) -> Iterator[str]:
    """Every global and attribute name that a code object uses, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _absent() -> None: ...


def _asked_by_super(owner: type) -> Sequence[type]:
    """The class whose forward `super().forward` is in the forward of a class; empty without one."""
    forward = own_forward(owner)
    if forward is None or not {"super", "forward"} <= set(names_in(forward.__code__)):
        return ()
    return [base for base in owner.__mro__ if "forward" in vars(base)][1:2]


def reached(
    function: types.FunctionType, owner: type, depth: int = _DEPTH
) -> Iterator[tuple[types.FunctionType, str]]:
    """(function, name it uses) for a function and what it calls in the same file or on `owner`,
    but for what torch's modules have.
    """
    seen: set[types.FunctionType] = set()
    queue: list[tuple[types.FunctionType, int]] = [(function, depth)]
    while queue:
        here, left = queue.pop()
        if here in seen:
            continue
        seen.add(here)
        for name in names_in(here.__code__):
            yield here, name
            if left > 0:
                helper, method = (
                    _function(found)
                    for found in (here.__globals__.get(name), getattr(owner, name, None))
                )
                if helper is not None and helper.__module__ == here.__module__:
                    queue.append((helper, left - 1))
                # A class may put its own in the place of what another file's forward calls.
                if method is not None and not str(method.__module__).startswith("torch."):
                    queue.append((method, left - 1))


def _reached(owner: type, depth: int = _DEPTH) -> Iterator[tuple[types.FunctionType, str]]:
    forward = own_forward(owner)
    return iter(()) if forward is None else reached(forward, owner, depth)


def _function(value: Any) -> types.FunctionType | None:
    if not callable(value):
        return None
    value = inspect.unwrap(value)
    return value if isinstance(value, types.FunctionType) else None


def _takes_product(code: types.CodeType) -> bool:
    return any(
        instruction.opname == "BINARY_OP" and instruction.argrepr == "@"
        for instruction in dis.get_instructions(code)
    )


def compares_implementation(owner: type) -> bool:
    """Whether a method of a class compares the configured attention name with "sdpa"."""
    return any(
        function is not None
        and "_attn_implementation" in names_in(function.__code__)
        and _compares(function.__code__, "sdpa")
        for base in owner.__mro__
        if base.__module__ == owner.__module__
        for function in map(_function, vars(base).values())
    )


def _compares(code: types.CodeType, text: str) -> bool:
    return any(
        instruction.opname == "LOAD_CONST"
        and (instruction.argval == text or text in _members(instruction.argval))
        and then.opname in ("COMPARE_OP", "CONTAINS_OP")
        for instruction, then in pairwise(dis.get_instructions(code))
    )


def _members(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()
