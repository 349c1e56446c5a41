"""Attention as people write it themselves: calling SDPA, in the ways that occur, or by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


class VisionAttention(nn.Module):
    """One matrix for q, k and v, and a switch between SDPA and a softmax by hand."""

    def __init__(self, dim: int = 64, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.fused_attn = True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(x).reshape(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            x = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj(x.transpose(1, 2).reshape(B, S, D))


class CrossAttention(nn.Module):
    """Keys and values from a context; the SDPA call under another name, in a method of its own."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        B, S, D = x.shape
        q = self.q(x).reshape(B, S, self.heads, -1).transpose(1, 2)
        k, v = (
            self.kv(context).reshape(B, -1, 2, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        )
        return self.attend(q, k, v)


class HandAttention(nn.Module):
    """A softmax by hand."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


class Block(nn.Module):
    """Attention and a residual; patched is the inside, not the block."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = VisionAttention(dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attn(self.norm(x))
        return out


def own_vision(blocks: int = 3) -> tuple[nn.Module, Tensor]:
    """A stack of blocks with an input of [2, 37, 64]."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.2)
    return model, torch.randn(2, 37, 64, generator=torch.Generator().manual_seed(1))
