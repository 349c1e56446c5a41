"""Which tensors of a call the Hopper kernel reads as they lie, by tensor map, and by what strides:
the pre-pass makes codes and copies of the others. Launches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagepatch.backends.cuda.prepass_form import reads_values
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# What attention can make codes of, and what a tensor map asks of addresses and strides.
RAW_DTYPES = (torch.float16, torch.bfloat16)
MAP_BYTES = 16


def raw_strides(call: Call, recipe: Recipe) -> tuple[int, ...] | None:
    """Strides of batch, heads and tokens for the attention to read Q by tensor map and make its
    codes; None where the pre-pass makes them: scales of blocks, a log-sum-exp (which needs the mean
    of K), and tensors that a map cannot describe.
    """
    q = call.q
    if recipe.q_granularity != "token" or call.return_lse or q.dtype not in RAW_DTYPES:
        return None
    return map_strides(q)


def raw_value_strides(call: Call, recipe: Recipe) -> tuple[int, ...] | None:
    """As `raw_strides`, for the attention to read V as it lies; None where it has to be copied: to
    another type or scale, without keys that a mask hides (NaN times zero is NaN) or that belong to
    a neighbour, and where a tensor map cannot describe it.
    """
    if not reads_values(recipe, call.v.dtype) or call.attn_mask is not None or call.packed:
        return None
    return map_strides(call.v)


def map_strides(x: Tensor) -> tuple[int, ...] | None:
    """Strides of all but the last axis of a 16-bit tensor for a tensor map; None where there can be
    none.
    """
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % MAP_BYTES:
        return None
    step = MAP_BYTES // x.element_size()
    if any(n > 1 and (s <= 0 or s % step) for n, s in zip(x.shape, strides, strict=False)):
        return None
    # An axis of one element may have any stride.
    return tuple(s if n > 1 else step for n, s in zip(x.shape, strides, strict=False))
