"""Calls of a kind that was served before: what they allocate and launch is known, and found by one
key. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sagepatch.backends.chain import Chain
from sagepatch.bounded import Bounded
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# What a call brings to its chain of launches, by place: addresses (0 for what it has not), and the
# softmax scale times what its kernels want.
Q, K, V, MASK, CU_Q, CU_K, FLAGS, OUT, LSE, SCRATCH, FACTOR = range(11)
VALUES = 11
# Addresses that kernels tell apart, and nothing finer: vectors of 16 bytes, tensor maps.
ALIGNMENT = 16
MOST_KINDS = 1024


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
    mask, cu_q, cu_k = call.attn_mask, call.cu_seqlens_q, call.cu_seqlens_kv
    return (
        call.q.data_ptr(),
        call.k.data_ptr(),
        call.v.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if cu_q is None else cu_q.data_ptr(),
        0 if cu_k is None else cu_k.data_ptr(),
        *(flags, out, lse, scratch, factor),
    )


class Prepared:
    """How calls of one kind are served: the output they get, scratch memory, launches.

    The chain belongs to CUDA device number `device`. Memory of the output is in the order of
    `out_shape`; `bshd` says that its heads and tokens are to be swapped for a caller that knows
    [B, Hq, Sq, Dv] alone.
    """

    __slots__ = (
        *("chain", "scratch_bytes", "device", "number", "out_shape", "out_dtype", "bshd"),
        *("lse_shape", "factor_of_scale", "recipe"),
    )

    def __init__(
        self, chain: Chain, scratch_bytes: int, call: Call, recipe: Recipe, factor_of_scale: float
    ) -> None:
        B, Hq, Sq, _ = call.q.shape
        Dv = call.v.shape[3]
        self.chain = chain
        self.scratch_bytes = scratch_bytes
        self.device = call.q.device
        self.number: int = call.q.device.index
        self.bshd = call.bshd_out
        self.out_shape = (B, Sq, Hq, Dv) if call.bshd_out else (B, Hq, Sq, Dv)
        self.out_dtype = call.v.dtype
        self.lse_shape = (B, Hq, Sq) if call.return_lse else None
        self.factor_of_scale = factor_of_scale
        self.recipe = recipe

    def __call__(
        self,
        q: int,
        k: int,
        v: int,
        scale: float,
        mask: int = 0,
        cu_q: int = 0,
        cu_k: int = 0,
        flags: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Launch on the current stream of the device: the output in the order of `out_shape`, and
        the log-sum-exp [B, Hq, Sq] where the kind asks for one. All but `scale` are addresses.
        """
        if self.number != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(q, k, v, scale, mask, cu_q, cu_k, flags)
        out = torch.empty(self.out_shape, dtype=self.out_dtype, device=self.device)
        lse = None
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
        self.chain(
            self.number,
            (
                *(q, k, v, mask, cu_q, cu_k, flags, out.data_ptr()),
                0 if lse is None else lse.data_ptr(),
                scratch.data_ptr(),
                scale * self.factor_of_scale,
            ),
        )
        return out, lse


# Serves a call and says how the next of its kind can be: (call, recipe, flags).
Begin = Callable[[Call, Recipe, Tensor | None], tuple[Tensor, Tensor | None, Prepared | None]]
_PREPARED: Bounded[tuple[Any, ...], Prepared] = Bounded(MOST_KINDS)


def comes_again(call: Call) -> bool:
    """Whether it pays to remember how a call on a GPU is served. The next token of a language model
    has one key more: no call is of its kind.
    """
    return call.q.is_cuda and call.q.shape[2] > 1


def kind_of(call: Call) -> tuple[Any, ...]:
    """All that launches depend on but for addresses, as cheaply as Python allows."""
    q, k, v, mask, cu_q, cu_k = (
        *(call.q, call.k, call.v, call.attn_mask),
        *(call.cu_seqlens_q, call.cu_seqlens_kv),
    )
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        not (at[0] | at[1] | at[2]) % ALIGNMENT or tuple(a % ALIGNMENT for a in at),
        *(call.causal_offset, call.window, call.softcap, call.bshd_out, call.return_lse),
        call.sinks is None,
        None if mask is None else kind_of_mask(mask),
        None if cu_q is None or cu_k is None else (*_kind_of_row(cu_q), *_kind_of_row(cu_k)),
    )


def _kind_of_row(offsets: Tensor) -> tuple[Any, ...]:
    return offsets.shape, offsets.dtype, offsets.device, offsets.data_ptr() % ALIGNMENT


def kind_of_mask(mask: Tensor) -> tuple[Any, ...]:
    """What launches depend on of a mask."""
    return mask.shape, mask.stride(), mask.dtype, mask.device, mask.data_ptr() % ALIGNMENT


def serve(
    toolchain: str, begin: Begin, call: Call, recipe: Recipe, flags: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Serve a call as one of its kind was served before, or by `begin`; output [B, Hq, Sq, Dv] in
    the order that the call asks for.
    """
    key = _key(toolchain, call, recipe, flags)
    found = _PREPARED.get(key)
    if found is not None:
        return again(found, call, flags)
    out, lse, found = begin(call, recipe, flags)
    if found is not None:
        _PREPARED[key] = found
    return out, lse


def find(
    toolchain: str, call: Call, recipe: Recipe, flags: Tensor | None = None
) -> Prepared | None:
    """How a call was served; None where none of its kind was."""
    return _PREPARED.get(_key(toolchain, call, recipe, flags))


def _key(toolchain: str, call: Call, recipe: Recipe, flags: Tensor | None) -> tuple[Any, ...]:
    guarded = None if flags is None else flags.data_ptr() % ALIGNMENT
    # Hashing a recipe costs more than the rest of the key: entries hold theirs, so that ids stay.
    return (toolchain, id(recipe), guarded, *kind_of(call))


def again(
    prepared: Prepared, call: Call, flags: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Serve a call of the kind of `prepared`."""
    mask, cu_q, cu_k = call.attn_mask, call.cu_seqlens_q, call.cu_seqlens_kv
    out, lse = prepared(
        call.q.data_ptr(),
        call.k.data_ptr(),
        call.v.data_ptr(),
        call.scale,
        0 if mask is None else mask.data_ptr(),
        0 if cu_q is None else cu_q.data_ptr(),
        0 if cu_k is None else cu_k.data_ptr(),
        0 if flags is None else flags.data_ptr(),
    )
    return out.transpose(1, 2) if prepared.bshd else out, lse
