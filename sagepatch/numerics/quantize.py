"""Quantisers: groups of numbers to INT8, INT4 or FP8 codes and one scale a group. No attention in
here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagepatch.numerics.recipe import Granularity

# A warp holds 32 query rows of an mma tile; rows with the same index mod 8 sit in one thread's
# fragment.
WARP_ROWS = 32
# Key groups of an mma fragment repeat every 64 keys; keys with the same (index mod 8) // 2 share a
# thread.
FRAGMENT_KEYS = 64


class Quantised(NamedTuple):
    """Integer codes held as floats (exact) and the scale of every element's group, broadcast to
    `codes`.
    """

    codes: Tensor
    scale: Tensor


def group_amax(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Largest magnitude of each group of rows of x [..., S, D], shape [..., groups]; NaN stays NaN.

    `group` [S] numbers the group of each row.
    """
    rows = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    index = group.expand(rows.shape)
    # scatter_reduce's amax drops NaN on some devices: carry it by hand.
    nan = torch.zeros(*rows.shape[:-1], groups, dtype=rows.dtype, device=rows.device)
    amax = nan.scatter_reduce(-1, index, torch.nan_to_num(rows, nan=0.0, posinf=torch.inf), "amax")
    poisoned = nan.scatter_reduce(-1, index, rows.isnan().to(rows.dtype), "amax")
    return torch.where(poisoned > 0, torch.nan, amax)


def query_groups(length: int, granularity: Granularity, block: int, device: torch.device) -> Tensor:
    """The group number of each of `length` query rows, [length] int64."""
    row = torch.arange(length, device=device)
    if granularity == "token":
        return row
    if granularity == "block":
        return row // block
    if granularity == "thread":
        return row // WARP_ROWS * 8 + row % 8
    return torch.zeros_like(row)


def key_groups(length: int, granularity: Granularity, block: int, device: torch.device) -> Tensor:
    """The group number of each of `length` keys, [length] int64; `thread` makes four groups per 64
    keys.
    """
    key = torch.arange(length, device=device)
    if granularity == "token":
        return key
    if granularity == "block":
        return key // block
    if granularity == "thread":
        return key // FRAGMENT_KEYS * 4 + key % 8 // 2
    return torch.zeros_like(key)


def to_integer(x: Tensor, group: Tensor, largest: int) -> Quantised:
    """Quantise rows of x [..., S, D] fp32 to integers of magnitude at most `largest`, one scale a
    group.

    code = rint(x * (largest / amax)), half to even; scale = amax / largest, 0 for a group of zeros.
    NaN in a group makes its scale NaN, so that it reaches the output.
    """
    groups = int(group.max()) + 1 if group.numel() else 1
    amax = group_amax(x, group, groups)[..., group]  # [..., S]
    return _integer_codes(x, amax.unsqueeze(-1), largest)


def to_integer_per_channel(x: Tensor, largest: int) -> Quantised:
    """As `to_integer`, one scale a channel of x [..., S, D]."""
    return _integer_codes(x, channel_amax(x), largest)


def channel_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each channel of x [..., S, D], shape [..., 1, D]; zero for no rows."""
    if x.shape[-2] == 0:
        return x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    return x.abs().amax(-2, keepdim=True)


def to_float8_per_channel(x: Tensor, largest: float, dtype: torch.dtype) -> Quantised:
    """Quantise x [..., S, D] fp32 so that each channel's largest magnitude becomes `largest`,
    rounded to FP8.
    """
    amax = channel_amax(x)
    inverse = torch.where(amax == 0, 0.0, largest / amax)
    return Quantised(round_to(x * inverse, dtype), amax / largest)


def to_float16_per_channel(x: Tensor, largest: float) -> Quantised:
    """Round x [..., S, D] fp32 to FP16; a channel above `largest` is scaled down by a power of two
    first.
    """
    amax = channel_amax(x)
    exponent = torch.ceil(torch.log2(amax / largest)).clamp(min=0)
    scale = torch.where(amax > largest, torch.exp2(exponent), torch.ones_like(amax))
    scale = torch.where(amax.isfinite(), scale, torch.where(amax.isnan(), torch.nan, 1.0))
    return Quantised(round_to(x / scale, torch.float16), scale)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to the grid of `dtype` (to nearest, ties to even), kept as fp32."""
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        top = torch.finfo(dtype).max
        x = x.clamp(-top, top)
    return x.to(dtype).to(x.dtype)


def _integer_codes(x: Tensor, amax: Tensor, largest: int) -> Quantised:
    inverse = torch.where(amax == 0, 0.0, largest / amax)
    codes = torch.round(x * inverse)
    # An infinite amax gives 0 * inf = NaN codes and an infinite scale: both reach the output as
    # NaN.
    return Quantised(codes, amax / largest)
