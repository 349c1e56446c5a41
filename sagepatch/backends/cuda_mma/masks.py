"""Masks of queries and keys for the mma.sync kernel: what they leave of each tile, and which keys
anybody sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import load
from sagepatch.backends.cuda_mma.tiles import BLOCK_M, TYPES
from sagepatch.spec import Call, MaskKind, mask_kind

SIGNATURE = "PPPqqqqiiiii"
THREADS = 256
# Macro MASK of the kernel.
KINDS = {
    MaskKind.NONE: 0,
    MaskKind.KEY_PADDING: 1,
    MaskKind.BOOL: 2,
    MaskKind.ADDITIVE: 3,
}


@dataclass(frozen=True, slots=True)
class FullMask:
    """A bool or additive mask, expanded by strides, and what it leaves of each tile."""

    mask: Tensor  # [B, Hq, Sq, Skv]; bool as uint8
    states: Tensor  # [entries, tiles] uint8: 0 nothing, 1 some, 2 all
    entry_strides: tuple[int, int, int]  # batch, head, block of queries
    seen: Tensor  # [B, 1, 1, Skv] bool: some query sees the key


def full_mask(call: Call, block_n: int, target: str) -> FullMask | None:
    """Classify the tiles of a call's mask; None where it has none, or one of keys only."""
    mask = call.attn_mask
    if mask is None or mask_kind(mask) is MaskKind.KEY_PADDING:
        return None
    B, Hq, Sq, _ = call.q.shape
    Skv = call.k.shape[2]
    additive = mask.dtype != torch.bool
    if additive and mask.dtype not in TYPES:
        mask = narrowed(mask)
    mask = mask[(None,) * (4 - mask.dim())]
    if not additive:
        mask = mask.view(torch.uint8)
    own = [size if mask.stride(axis) else 1 for axis, size in enumerate(mask.shape)]
    mask = mask.expand(B, Hq, Sq, Skv)
    tiles = -(-Skv // block_n)
    q_blocks = -(-own[2] // BLOCK_M)
    entries = own[0] * own[1] * q_blocks
    states = torch.empty((entries, tiles), dtype=torch.uint8, device=mask.device)
    seen = torch.zeros((own[0], Skv), dtype=torch.uint8, device=mask.device)
    program = mask_program(block_n, mask.dtype if additive else None, target)
    kernel = load(program, "mask_states", SIGNATURE, threads=THREADS)
    kernel(
        mask.device.index,
        entries * tiles,
        *(mask.data_ptr(), states.data_ptr(), seen.data_ptr()),
        *mask.stride(),
        *(own[1], q_blocks, tiles, own[2], Skv),
    )
    strides = (
        own[1] * q_blocks if own[0] > 1 else 0,
        q_blocks if own[1] > 1 else 0,
        1 if own[2] > 1 else 0,
    )
    return FullMask(mask, states, strides, seen.view(torch.bool).expand(B, Skv)[:, None, None])


def narrowed(mask: Tensor) -> Tensor:
    """An additive mask in FP32. What is finite stays so: -inf would hide a key, and a row that only
    FP64's lowest number covers is to stay the mean of V. Infinities and NaN stay.
    """
    narrow = mask.float()
    if mask.dtype != torch.float64:
        return narrow
    most = torch.finfo(torch.float32).max
    return torch.where(mask.isfinite(), narrow.clamp(-most, most), narrow)


def mask_program(block_n: int, additive: torch.dtype | None, target: str) -> Program:
    """The program that classifies the tiles of a bool mask, or of an additive one of a type."""
    defines = (
        ("BLOCK_M", BLOCK_M),
        ("BLOCK_N", block_n),
        ("ADDITIVE", int(additive is not None)),
        ("MASK_TYPE", 0 if additive is None else TYPES[additive]),
    )
    return Program("mma_masks.cu", defines, target)
