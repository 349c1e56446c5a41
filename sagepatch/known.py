"""Calls like one that was served before, of `sagepatch.attention` and of patched layers: found by
one key of what was passed, so that neither checks nor choices are made again. Chooses nothing
itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagepatch.backends.prepared import (
    Addresses,
    Form,
    Look,
    Prepared,
    comes_again,
    find,
    kind_of,
    look_of,
)
from sagepatch.bounded import Bounded
from sagepatch.layer import capturing, find_layer
from sagepatch.ops import chosen_for, operations_are_watched, run_known, settled
from sagepatch.spec import Call

MOST_KNOWN = 1024


class Known(NamedTuple):
    """How calls with one key are served: `scale` where the caller gives none, the output in the
    caller's layout.
    """

    prepared: Prepared
    scale: float
    form: Form


_KNOWN: Bounded[tuple[Any, ...], Known] = Bounded(MOST_KNOWN)
# How often calls with a key were looked at in vain: most of those that are not known after the
# first never will be, and looking costs more than the rest that a call on a CPU takes.
_TRIED: Bounded[tuple[Any, ...], int] = Bounded(MOST_KNOWN)


def seen_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Addresses, Look] | None:
    """Where the tensors of a call are and what they look like; None for a call that may not be
    served from memory and takes the whole way: torch's operations are watched, autocast is on, a
    derivative may be wanted, or a tensor is not plain memory.
    """
    if (
        not type(q) is type(k) is type(v) is Tensor
        or operations_are_watched()
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or (mask is not None and (type(mask) is not Tensor or mask.is_neg()))
    ):
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
    ):
        return None
    try:
        masked = 0 if mask is None else mask.data_ptr()
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), masked, 0, 0
        return at, look_of(q, k, v, mask, at)
    except RuntimeError:
        # Raised for strides or the address of a sparse, nested or opaque tensor.
        return None


def recall(key: tuple[Any, ...]) -> Known | None:
    """How a call with this key was served; None where it is to be served as any other."""
    return _KNOWN.get(key)


def learn(key: tuple[Any, ...], call: Call, variant: str, batched: bool) -> None:
    """Keep how `call` was served, where its kernel can be launched again as it was. Where it
    cannot, only the 1st, 2nd, 4th, 8th ... call with its key is looked at.
    """
    tried = _TRIED.get(key, 0) + 1
    _TRIED[key] = tried
    if tried & (tried - 1):
        return
    spec = call.spec()
    if capturing(spec):
        # It says nothing of calls outside a graph.
        _TRIED.pop(key, None)
        return
    chosen = chosen_for(spec, variant)
    prepared = find(chosen.toolchain, call, chosen.recipe)
    if prepared is not None:
        form = prepared.form
        if call.bshd_out:
            form = form.swapped()
        if not batched:
            form = form.without_batch()
        _KNOWN[key] = Known(prepared, 1 / math.sqrt(call.q.shape[3]), form)
        _TRIED.pop(key, None)


def run_layer_again(call: Call, handle: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Run a call of a patched layer as it ran one of the same kind; None where it did not, or the
    call is to be looked at. Not for code that is being compiled.
    """
    if call.sinks is not None or call.cu_seqlens_q is not None or not comes_again(call):
        return None
    seen = seen_of(call.q, call.k, call.v, call.attn_mask)
    layer = None if seen is None else find_layer(handle)
    if seen is None or layer is None or not settled(layer):
        return None
    at, look = seen
    way = layer.ways.get(kind_of(call, look))
    return None if way is None else run_known(layer, way, call, at)
