"""The calls that h200_schedule.py runs on the Hopper kernels: forms, and which of them shows which
fault. Makes tensors on the GPU when asked to; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sagepatch.backends.cuda import attention_tiles
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

DEVICE = "cuda"
DIMS = (128, 64, 256)
# Where a fault is put: recipe, head size, form.
WAYS = {
    "serial": ("sage2_8", 128, "dense"),
    "short": ("sage2_8", 128, "few keys"),
    "codes of Q": ("sage2_8", 128, "log-sum-exp"),
    "overlapped": ("sage2pp_8_d4", 64, "dense"),
    "pieces": ("sage2_8", 256, "dense"),
    "in place": ("sage1_b_f32", 256, "dense"),
    "causal": ("sage2_8", 128, "causal"),
    "shared": ("sage2_8", 128, "shared"),
}


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    """A call of shape (B, Hq, Hkv, Sq, Skv, D)."""
    B, Hq, Hkv, Sq, Skv, D = shape
    q, k, v = (
        torch.randn(B, heads, tokens, D, device=DEVICE, dtype=dtype)
        for heads, tokens in ((Hq, Sq), (Hkv, Skv), (Hkv, Skv))
    )
    return Call(q, k, v, D**-0.5, **options)


def lengths(members: int, total: int) -> Tensor:
    """Offsets of `members` members, the third of which is empty."""
    ends = torch.linspace(0, total, members + 1).round().to(torch.int32)
    ends[3] = ends[2]
    return ends.to(DEVICE)


def dense(dim: int) -> Call:
    # Three or four blocks of queries for each multiprocessor, tails of both lengths.
    return make((2, 12, 3, 3500, 777, dim))


def few_keys(dim: int) -> Call:
    # The copies of one block reach into the next but one.
    return make((2, 24, 24, 3500, 130, dim))


def keys(dim: int, **options: Any) -> Call:
    keep = torch.rand(2, 1, 1, 900, device=DEVICE) < 0.5
    keep[:, ..., 130:260] = False
    keep[:, ..., 260:700] = True
    return make((2, 12, 12, 2200, 900, dim), attn_mask=keep, **options)


def packed(dim: int, **options: Any) -> Call:
    offsets = {"cu_seqlens_q": lengths(7, 2600), "cu_seqlens_kv": lengths(7, 3100)}
    if "causal_offset" in options:
        offsets["cu_seqlens_kv"] = offsets["cu_seqlens_q"]
        return make((1, 24, 6, 2600, 2600, dim), **offsets, **options)
    return make((1, 24, 6, 2600, 3100, dim), **offsets, **options)


FORMS: dict[str, Callable[[int], Call]] = {
    "dense": dense,
    "few keys": few_keys,
    "log-sum-exp": lambda dim: replace(dense(dim), return_lse=True),
    "shared": dense,
    "causal": lambda dim: make((1, 24, 6, 3100, 3333, dim), causal_offset=233),
    "window": lambda dim: make((1, 24, 6, 3100, 3100, dim), causal_offset=0, window=700),
    "keys": keys,
    "keys, causal": lambda dim: keys(dim, causal_offset=100),
    "packed": packed,
    "packed, causal": lambda dim: packed(dim, causal_offset=0),
    "fp16, [B, S, H, D]": lambda dim: make(
        (2, 12, 3, 2500, 500, dim), torch.float16, bshd_out=True
    ),
}


def runs(form: str, recipe: str, dim: int) -> bool:
    """Whether the kernels serve the form."""
    if attention_tiles.refusal(RECIPES[recipe], dim, dim) is not None:
        return False
    tile = attention_tiles.pick(RECIPES[recipe], dim, dim)
    if form == "shared":
        return tile.shares
    return tile.block_n <= 128 or not form.startswith("packed")
