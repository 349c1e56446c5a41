"""Calls of `sagepatch.attention` like one that was served before: found by one key of what was
passed, so that neither checks nor choices are made again. Chooses nothing itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagepatch.backends.prepared import ALIGNMENT, Prepared, find, kind_of_mask
from sagepatch.bounded import Bounded
from sagepatch.layer import capturing
from sagepatch.ops import chosen_for, observed, plain
from sagepatch.spec import Call

MOST_KNOWN = 1024


class Known(NamedTuple):
    """How calls with one key are served; `scale` where the caller gives none."""

    prepared: Prepared
    scale: float
    batched: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What `sagepatch.attention` returns."""
        out, lse = self.prepared(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            self.scale if scale is None else float(scale),
            0 if mask is None else mask.data_ptr(),
        )
        if self.batched:
            return out if lse is None else (out, lse)
        return out.squeeze(0) if lse is None else (out.squeeze(0), lse.squeeze(0))


_KNOWN: Bounded[tuple[Any, ...], Known] = Bounded(MOST_KNOWN)


def key_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, *options: object
) -> tuple[Any, ...] | None:
    """All that decides how a call is served, but for addresses and the scale; None for a call that
    is looked at one by one: traced or watched, under autocast, one that may want a derivative,
    tensors that are more or less than memory.
    """
    if observed(q, k, v) or torch.is_autocast_enabled("cuda") or forward_ad._current_level >= 0:
        return None
    seen: tuple[Any, ...] | None = None
    if mask is not None:
        if type(mask) is not Tensor or not plain(mask):
            return None
        seen = kind_of_mask(mask)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
    ):
        return None
    if scale is not None and not abs(scale) < math.inf:
        return None
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        not (at[0] | at[1] | at[2]) % ALIGNMENT or tuple(a % ALIGNMENT for a in at),
        seen,
        *options,
    )


def recall(key: tuple[Any, ...]) -> Known | None:
    """How a call with this key was served; None where it is to be served as any other."""
    return _KNOWN.get(key)


def remember(key: tuple[Any, ...], call: Call, variant: str, batched: bool) -> None:
    """Keep how `call` was served, where its kernel can be launched again as it was."""
    spec = call.spec()
    if capturing(spec):
        return
    chosen = chosen_for(spec, variant)
    prepared = find(chosen.toolchain, call, chosen.recipe)
    if prepared is not None:
        _KNOWN[key] = Known(prepared, 1 / math.sqrt(call.q.shape[3]), batched)
