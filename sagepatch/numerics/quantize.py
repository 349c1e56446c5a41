"""Quantisers: groups of numbers to INT8, INT4, FP8, FP16 or BF16 codes and one scale a group. No
attention in here.
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
# A group whose largest magnitude is below this counts as zeros: largest / amax would leave fp32.
TINY = 1e-35
# Bits of the stored mantissa of the FP8 formats.
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
EXPONENT_FIELD = 0x7F800000


class Quantised(NamedTuple):
    """Codes held as fp32 (exact), and the scale of every element's group, broadcastable to
    `codes`; `codes * scale` dequantises.
    """

    codes: Tensor
    scale: Tensor


def query_groups(length: int, granularity: Granularity, block: int, device: torch.device) -> Tensor:
    """The group number of each of `length` query rows, [length] int64.

    `thread` is the paper's grouping: of each 32 rows, those with the same index mod 8 share a
    scale.
    """
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


def group_amax(x: Tensor, group: Tensor) -> Tensor:
    """Largest magnitude of each row's group in x [..., S, D], shape [..., S, 1]; NaN stays NaN.

    `group` [S] numbers the group of each row.
    """
    rows = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    if group.numel() == 0:
        return rows.unsqueeze(-1)
    index = group.expand(rows.shape)
    zeros = rows.new_zeros(*rows.shape[:-1], int(group.max()) + 1)
    # scatter_reduce's amax drops NaN on some devices: carry it by hand.
    nan = rows.isnan()
    amax = zeros.scatter_reduce(-1, index, rows.masked_fill(nan, 0.0), "amax")
    poisoned = zeros.scatter_reduce(-1, index, nan.to(rows.dtype), "amax")
    return amax.masked_fill(poisoned > 0, torch.nan)[..., group].unsqueeze(-1)


def channel_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each channel of x [..., S, D], shape [..., 1, D]; zero for no rows."""
    if x.shape[-2] == 0:
        return x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    return x.abs().amax(-2, keepdim=True)


def to_integer(x: Tensor, group: Tensor, largest: int) -> Quantised:
    """Quantise rows of x [..., S, D] fp32 to integers of magnitude at most `largest`, one scale a
    group.

    code = rint(x * (largest / amax)), half to even; scale = amax / largest. A group of zeros has
    codes and scale 0; one that holds NaN or infinity has the scale NaN, so that it reaches the
    output.

    >>> to_integer(torch.tensor([[0.5, -1.0]]), torch.tensor([0]), 127).codes
    tensor([[  64., -127.]])
    """
    inverse, scale = inverse_and_scale(group_amax(x, group), largest)
    return Quantised(torch.round(x * inverse), scale)


def to_integer_per_channel(x: Tensor, largest: int) -> Quantised:
    """As `to_integer`, one scale a channel of x [..., S, D]."""
    inverse, scale = inverse_and_scale(channel_amax(x), largest)
    return Quantised(torch.round(x * inverse), scale)


def to_float8(x: Tensor, group: Tensor, largest: float, dtype: torch.dtype) -> Quantised:
    """As `to_integer` to FP8: each group's largest magnitude becomes `largest`, then `round_to`."""
    inverse, scale = inverse_and_scale(group_amax(x, group), largest)
    return Quantised(round_to(x * inverse, dtype), scale)


def to_float8_per_channel(x: Tensor, largest: float, dtype: torch.dtype) -> Quantised:
    """As `to_float8`, one scale a channel of x [..., S, D]."""
    inverse, scale = inverse_and_scale(channel_amax(x), largest)
    return Quantised(round_to(x * inverse, dtype), scale)


def to_float16_per_channel(x: Tensor, largest: float) -> Quantised:
    """Round x [..., S, D] fp32 to FP16; a channel above `largest` is scaled down first, by the
    least power of two that brings it to `largest` or under.
    """
    amax = channel_amax(x)
    mantissa, exponent = torch.frexp(amax / largest)  # mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    scale = torch.where((amax > largest) & amax.isfinite(), power, 1.0)
    scale = scale.masked_fill(amax.isnan(), torch.nan)
    return Quantised(round_to(x / scale, torch.float16), scale)


def to_bfloat16(x: Tensor) -> Quantised:
    """Round x [..., S, D] fp32 to BF16, whose exponents are those of fp32: every channel's scale is
    1, or NaN where the channel holds one.
    """
    amax = channel_amax(x)
    scale = torch.ones_like(amax).masked_fill(amax.isnan(), torch.nan)
    return Quantised(round_to(x, torch.bfloat16), scale)


def inverse_and_scale(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """largest / amax and amax / largest: both 0 below `TINY`; the scale NaN unless amax is finite.

    Dividing by the scale instead of multiplying by the inverse gives other codes now and then:
    this form is the specification.
    """
    silent = amax < TINY
    inverse = (largest / amax).masked_fill(silent, 0.0)
    scale = (amax / largest).masked_fill(silent, 0.0)
    return inverse, scale.masked_fill(~amax.isfinite(), torch.nan)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to the grid of `dtype`, half to even, kept as fp32.

    FP8 saturates at its largest value, as conversions with `satfinite` do; FP16 overflows to
    infinity. NaN stays NaN.
    """
    if dtype not in MANTISSA_BITS:
        return x.to(dtype).to(x.dtype)
    info = torch.finfo(dtype)
    x = x.clamp(-info.max, info.max)
    # The power of two at or below |x|; below the least normal value the grid gets no finer.
    power = (x.view(torch.int32) & EXPONENT_FIELD).view(torch.float32)
    power = power.clamp_(min=info.smallest_normal)
    # fp32 addition rounds: in the binade of `magic` one unit is one step of the grid around x.
    magic = power.mul_(1.5 * 2.0 ** (23 - MANTISSA_BITS[dtype]))
    return (x + magic).sub_(magic)
