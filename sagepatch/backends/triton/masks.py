"""Which tiles of keys a mask leaves anything of: lists of whole and partial tiles, made on the
device in one pass over the mask, so that dead tiles are never loaded.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagepatch.backends.positions import plain_positions
from sagepatch.backends.triton.primitives import seen_by_position
from sagepatch.spec import Call, MaskKind, mask_kind


@dataclass(frozen=True, slots=True)
class LiveTiles:
    """The mask, expanded by strides, and its lists.

    `tiles` [..., T] int32 holds the numbers of whole tiles from the front and of partial ones from
    the back; `counts` [..., 2] how many of each. Entry strides of 0 broadcast.
    """

    mask: Tensor  # [B, Hq, Sq, Skv]; bool as uint8
    additive: bool
    tiles: Tensor
    counts: Tensor
    entry_strides: tuple[int, int, int]  # batch, head, block of queries
    seen: Tensor  # [B, Skv] by strides: not 0 where some query sees the key


@triton.jit
def _list_key_tiles(
    Mask,
    Tiles,
    Counts,
    kv_len,
    tiles,
    stride_b,
    stride_k,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a batch member: every query sees the same keys."""
    batch = tl.program_id(0).to(tl.int64)
    whole = tl.program_id(0) * 0
    partial = tl.program_id(0) * 0
    for first in range(0, tiles, GROUP):
        tile = first + tl.arange(0, GROUP)
        keys = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = Mask + batch * stride_b + keys.to(tl.int64) * stride_k
        seen = (tl.load(at, mask=keys < kv_len, other=0) != 0).to(tl.int32)
        count = tl.sum(seen, 1)  # [GROUP]
        is_whole = (count == BLOCK_N).to(tl.int32)
        is_partial = ((count > 0) & (count < BLOCK_N)).to(tl.int32)
        front = whole + tl.cumsum(is_whole, 0) - 1
        back = tiles - partial - tl.cumsum(is_partial, 0)
        tl.store(Tiles + batch * tiles + front, tile, mask=is_whole != 0)
        tl.store(Tiles + batch * tiles + back, tile, mask=is_partial != 0)
        whole += tl.sum(is_whole, 0)
        partial += tl.sum(is_partial, 0)
    tl.store(Counts + batch * 2, whole)
    tl.store(Counts + batch * 2 + 1, partial)


@triton.jit
def _list_tiles(
    Mask,
    Seen,
    Tiles,
    Counts,
    q_len,
    kv_len,
    tiles,
    q_blocks,
    heads,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    causal_offset,
    window,
    ADDITIVE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program a batch member, head and block of queries of the mask."""
    entry = tl.program_id(0).to(tl.int64)
    q_block = (entry % q_blocks).to(tl.int32)
    head = entry // q_blocks % heads
    batch = entry // q_blocks // heads
    rows = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_at = Mask + batch * stride_b + head * stride_h + rows.to(tl.int64) * stride_q
    real = rows < q_len
    whole = q_block * 0
    partial = q_block * 0
    for tile in range(0, tiles):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = real[:, None] & (keys < kv_len)[None, :]
        value = tl.load(
            row_at[:, None] + keys.to(tl.int64)[None, :] * stride_k, mask=inside, other=0
        )
        if ADDITIVE:
            kept = inside & (value != float("-inf"))
            plain = value == 0
        else:
            kept = inside & (value != 0)
            plain = kept
        if MARK:
            column = tl.max(kept.to(tl.int32), 0)
            tl.atomic_max(Seen + batch * kv_len + keys, column, mask=column != 0)
        by_position = seen_by_position(rows, keys, kv_len, causal_offset, window, CAUSAL, WINDOW)
        live = tl.max(tl.max((kept & by_position).to(tl.int32), 1), 0)
        # Rows past the end may be anything: they are not stored.
        fits = (plain & by_position & (keys < kv_len)[None, :]) | (rows >= q_len)[:, None]
        full = tl.min(tl.min(fits.to(tl.int32), 1), 0)
        if live != 0:
            if full != 0:
                tl.store(Tiles + entry * tiles + whole, tile)
                whole += 1
            else:
                partial += 1
                tl.store(Tiles + entry * tiles + tiles - partial, tile)
    tl.store(Counts + entry * 2, whole)
    tl.store(Counts + entry * 2 + 1, partial)


def live_tiles(call: Call, block_m: int, block_n: int) -> LiveTiles | None:
    """Classify the tiles of a call's mask; None for a call without one."""
    if call.attn_mask is None:
        return None
    B, Hq, Sq, _ = call.q.shape
    Skv = call.k.shape[2]
    mask = call.attn_mask
    kind = mask_kind(mask)
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    own = [size if mask.stride(axis) else 1 for axis, size in enumerate(mask.shape)]
    mask = mask.expand(B, Hq, Sq, Skv)
    tiles = -(-Skv // block_n)
    device = mask.device
    per_key = kind is MaskKind.KEY_PADDING and call.causal_offset is None
    by_row = own[2] > 1 or call.causal_offset is not None
    q_blocks = -(-Sq // block_m) if by_row else 1
    entries = own[0] * own[1] * q_blocks
    lists = torch.empty((entries, tiles), dtype=torch.int32, device=device)
    counts = torch.empty((entries, 2), dtype=torch.int32, device=device)
    if per_key:
        seen = mask[:, 0, 0]
        _list_key_tiles[(own[0],)](
            mask,
            lists,
            counts,
            Skv,
            tiles,
            mask.stride(0),
            mask.stride(3),
            BLOCK_N=block_n,
            GROUP=32,
        )
    else:
        if kind is MaskKind.KEY_PADDING:
            seen = mask[:, 0, 0]
        else:
            marks = torch.zeros((own[0], Skv), dtype=torch.int32, device=device)
            seen = marks.expand(B, Skv)
        _list_tiles[(entries,)](
            mask,
            seen,
            lists,
            counts,
            Sq if own[2] > 1 or by_row else 1,
            Skv,
            tiles,
            q_blocks,
            own[1],
            mask.stride(0),
            mask.stride(1),
            mask.stride(2),
            mask.stride(3),
            *plain_positions(call),
            ADDITIVE=kind is MaskKind.ADDITIVE,
            CAUSAL=call.causal_offset is not None,
            WINDOW=call.window is not None,
            MARK=kind is not MaskKind.KEY_PADDING,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
        )
    strides = (
        own[1] * q_blocks if own[0] > 1 else 0,
        q_blocks if own[1] > 1 else 0,
        1 if by_row else 0,
    )
    return LiveTiles(mask, kind is MaskKind.ADDITIVE, lists, counts, strides, seen)
