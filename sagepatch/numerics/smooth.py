"""Smoothing: constants taken out of K, Q and V before quantising, and the rotation of Q and K.
Exact in exact arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of x [B, H, S, D] over valid tokens, [B, H, 1, D]; `valid` [B, S] bool; zero where none
    is valid.

    Invalid tokens do not enter, whatever bytes they hold.
    """
    if x.shape[2] == 0:
        return x.new_zeros(x.shape[0], x.shape[1], 1, x.shape[3])
    if valid is None:
        return x.mean(2, keepdim=True)
    keep = valid[:, None, :, None]
    count = keep.sum(2, keepdim=True).clamp(min=1)
    return torch.where(keep, x, 0.0).sum(2, keepdim=True) / count


def block_mean(q: Tensor, block: int) -> Tensor:
    """Mean of q [B, H, S, D] over each block of `block` rows, repeated to [B, H, S, D]."""
    B, H, S, D = q.shape
    blocks = -(-S // block)
    padded = torch.nn.functional.pad(q, (0, 0, 0, blocks * block - S))
    sums = padded.view(B, H, blocks, block, D).sum(3)
    counts = torch.full((blocks,), block, dtype=q.dtype, device=q.device)
    if blocks:
        counts[-1] = S - (blocks - 1) * block
    means = sums / counts[:, None]
    return means.repeat_interleave(block, 2)[:, :, :S]


def hadamard_rotation(dim: int, device: torch.device) -> Tensor:
    """An orthogonal matrix [P, P], P the power of two at or above `dim`: a Hadamard matrix with
    random signs, the same ones always.

    Q and K padded to P and multiplied by it keep their products (FlashAttention-3, arXiv
    2407.08608, section 3.3).
    """
    size = 1 << max(0, (dim - 1).bit_length())
    # On the CPU whatever the default device is: the signs are the same everywhere.
    cpu = torch.device("cpu")
    matrix = torch.ones(1, 1, device=cpu)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    seeded = torch.Generator(cpu).manual_seed(0)
    signs = torch.randint(0, 2, (size,), generator=seeded, device=cpu) * 2 - 1
    return (matrix * signs[:, None] / math.sqrt(size)).to(device)


def rotate(x: Tensor) -> Tensor:
    """x [..., D] fp32 times the rotation of its size, [..., P]."""
    matrix = hadamard_rotation(x.shape[-1], x.device)
    padded = torch.nn.functional.pad(x, (0, matrix.shape[0] - x.shape[-1]))
    return padded @ matrix
