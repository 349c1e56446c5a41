"""Small models of our own that call SDPA in their forward, as users' models do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Self-attention over x [B, N, C] with a residual."""

    def __init__(self, channels: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        return x + self.out(mixed.transpose(1, 2).reshape(B, N, C))


def stack(blocks: int = 4, channels: int = 64) -> nn.Sequential:
    """`blocks` equal blocks with random weights, seed 0."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(channels) for _ in range(blocks)]).eval()


def tokens(length: int = 70, channels: int = 64, batch: int = 2) -> Tensor:
    """Random input [batch, length, channels], seed 1."""
    return torch.randn(batch, length, channels, generator=torch.Generator().manual_seed(1))
