"""Calls of a kind that was served before: what they allocate and launch is known, and found by one
key. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagepatch.backends import memory
from sagepatch.backends.chain import Chain
from sagepatch.backends.parameters import FLOAT, POINTER
from sagepatch.bounded import Bounded
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# What a call brings to its chain of launches, by place: addresses (0 for what it has not), and the
# softmax scale times what its kernels want.
Q, K, V, MASK, CU_Q, CU_K, FLAGS, OUT, LSE, SCRATCH, FACTOR = range(11)
VALUES = FACTOR * POINTER + FLOAT
# Addresses that kernels tell apart, and nothing finer: vectors of 16 bytes, tensor maps.
ALIGNMENT = 16
MOST_KINDS = 1024
# Of q, k, v, the mask, cumulative lengths of queries and of keys; 0 for what a call has not.
Addresses = tuple[int, int, int, int, int, int]
# All that launches depend on of a call's tensors, but for their numbers (`look_of`).
Look = tuple[Any, ...]


def addresses_of(call: Call) -> Addresses:
    """Where the tensors of a call are."""
    mask, cu_q, cu_k = call.attn_mask, call.cu_seqlens_q, call.cu_seqlens_kv
    return (
        call.q.data_ptr(),
        call.k.data_ptr(),
        call.v.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if cu_q is None else cu_q.data_ptr(),
        0 if cu_k is None else cu_k.data_ptr(),
    )


def values_of(
    call: Call,
    *,
    out: int = 0,
    lse: int = 0,
    scratch: int = 0,
    flags: int = 0,
    factor: float = 0.0,
) -> tuple[int | float, ...]:
    """What `call` brings to a launch, by place."""
    return (*addresses_of(call), flags, out, lse, scratch, factor)


class Form(NamedTuple):
    """Shape and strides of an output, and of the log-sum-exp where one is asked for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lse: tuple[tuple[int, ...], tuple[int, ...]] | None

    @classmethod
    def of(cls, call: Call) -> Form:
        """Output [B, Hq, Sq, Dv] in the order of memory that the call asks for."""
        B, Hq, Sq, _ = call.q.shape
        Dv = call.v.shape[3]
        strides = (Hq * Sq * Dv, Dv, Hq * Dv, 1) if call.bshd_out else _dense(B, Hq, Sq, Dv)
        lse = ((B, Hq, Sq), _dense(B, Hq, Sq)) if call.return_lse else None
        return cls((B, Hq, Sq, Dv), strides, lse)

    def swapped(self) -> Form:
        """The same memory as [B, Sq, Hq, Dv]."""
        shape, strides = ((a, c, b, d) for a, b, c, d in (self.shape, self.strides))
        return Form(shape, strides, self.lse)

    def without_batch(self) -> Form:
        """The same of one batch as [Hq, Sq, Dv]."""
        lse = None if self.lse is None else (self.lse[0][1:], self.lse[1][1:])
        return Form(self.shape[1:], self.strides[1:], lse)


def _dense(*shape: int) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Prepared:
    """How calls of one kind are served: the output they get, scratch memory, launches.

    The chain belongs to CUDA device number `number`. `form`: the output [B, Hq, Sq, Dv] that calls
    of the kind ask for. `factor_of_scale`: what the kernels want the softmax scale times.
    """

    __slots__ = (
        *("chain", "scratch_bytes", "number", "form", "out_dtype", "factor_of_scale", "recipe"),
    )

    def __init__(
        self, chain: Chain, scratch_bytes: int, call: Call, recipe: Recipe, factor_of_scale: float
    ) -> None:
        self.chain = chain
        self.scratch_bytes = scratch_bytes
        self.number: int = call.q.device.index
        self.form = Form.of(call)
        self.out_dtype = call.v.dtype
        self.factor_of_scale = factor_of_scale
        self.recipe = recipe

    def __call__(
        self, at: Addresses, scale: float, form: Form, flags: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Launch on the current stream of the device: the output, and the log-sum-exp where the
        kind asks for one, as `form` says, which is that of the kind or the same memory.

        Raises torch.OutOfMemoryError, and RuntimeError with the driver's words where it refuses a
        launch.
        """
        number = self.number
        if torch._C._cuda_getDevice() != number:
            with torch.cuda.device(number):
                return self(at, scale, form, flags)
        out = memory.empty(form.shape, form.strides, self.out_dtype)
        lse = None if form.lse is None else memory.empty(*form.lse, torch.float32)
        stream = torch._C._cuda_getCurrentRawStream(number)
        scratch = memory.take(self.scratch_bytes, stream)
        try:
            self.chain(
                number,
                stream,
                (
                    *at,
                    flags,
                    out.data_ptr(),
                    0 if lse is None else lse.data_ptr(),
                    scratch,
                    scale * self.factor_of_scale,
                ),
            )
        finally:
            memory.give(scratch)
        return out, lse


# Serves a call and says how the next of its kind can be: (call, recipe, flags).
Begin = Callable[[Call, Recipe, Tensor | None], tuple[Tensor, Tensor | None, Prepared | None]]
_PREPARED: Bounded[tuple[Any, ...], Prepared] = Bounded(MOST_KINDS)


def comes_again(call: Call) -> bool:
    """Whether it pays to remember how a call on a GPU is served. The next token of a language model
    has one key more: no call is of its kind.
    """
    return call.q.is_cuda and call.q.shape[2] > 1


def look_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, at: Addresses) -> Look:
    """What launches depend on of the tensors of a call, as cheaply as Python allows."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
        not (at[0] | at[1] | at[2] | at[3] | at[4] | at[5]) % ALIGNMENT
        or tuple(a % ALIGNMENT for a in at),
    )


def kind_of(call: Call, look: Look) -> tuple[Any, ...]:
    """All that launches depend on but for addresses; `look` is that of the call's tensors."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    return (
        look,
        call.causal_offset,
        call.window,
        call.softcap,
        call.bshd_out,
        call.return_lse,
        call.sinks is None,
        None
        if cu_q is None or cu_k is None
        else (cu_q.shape, cu_q.dtype, cu_q.device, cu_k.shape, cu_k.dtype, cu_k.device),
    )


def serve(
    toolchain: str, begin: Begin, call: Call, recipe: Recipe, flags: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Serve a call as one of its kind was served before, or by `begin`; output [B, Hq, Sq, Dv] in
    the order that the call asks for.
    """
    at = addresses_of(call)
    key = _key(toolchain, call, at, recipe, flags)
    found = _PREPARED.get(key)
    if found is not None:
        return again(found, at, call.scale, flags)
    out, lse, found = begin(call, recipe, flags)
    if found is not None:
        _PREPARED[key] = found
    return out, lse


def find(
    toolchain: str, call: Call, recipe: Recipe, flags: Tensor | None = None
) -> Prepared | None:
    """How a call was served; None where none of its kind was."""
    return _PREPARED.get(_key(toolchain, call, addresses_of(call), recipe, flags))


def _key(
    toolchain: str, call: Call, at: Addresses, recipe: Recipe, flags: Tensor | None
) -> tuple[Any, ...]:
    guarded = None if flags is None else flags.data_ptr() % ALIGNMENT
    look = look_of(call.q, call.k, call.v, call.attn_mask, at)
    # By its id, as hashing a recipe costs more than the rest of the key. An entry holds its recipe,
    # so no other recipe can get that id.
    return (toolchain, id(recipe), guarded, kind_of(call, look))


def again(
    prepared: Prepared, at: Addresses, scale: float, flags: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Serve a call of the kind of `prepared`, whose tensors are at `at`."""
    return prepared(at, scale, prepared.form, 0 if flags is None else flags.data_ptr())
