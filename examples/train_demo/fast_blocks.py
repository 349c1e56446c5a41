"""Holds what makes training steps of the denoiser fast; the trained weights owe it nothing.

`torch.compile` of the blocks as diffusers writes them died in backward on an H200 (torch 2.11):
hence the rotation as a flip, and the attention call outside the graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def choose_kernels() -> None:
    """Set this process's switches: TF32 on, cuDNN attention off.

    The backward of cuDNN's attention gave NaN for these layouts (torch 2.11+cu130, H200); flash,
    memory-efficient and plain attention did not.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)


@torch.compiler.disable
def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over [B, S, H, D]."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    )
    return out.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, H, D] by tables [S, D]; equal to diffusers' to the bit."""
    sign = torch.ones_like(sin).unflatten(-1, (-1, 2))
    sign = torch.stack((-sign[..., 0], sign[..., 1]), -1).flatten(-2)
    flipped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x.float() * cos[None, :, None] + flipped.float() * (sin * sign)[None, :, None]).to(
        x.dtype
    )


class FastProcessor:
    """Flux attention for training; same arithmetic as `FluxAttnProcessor`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert attention_mask is None
        assert image_rotary_emb is not None
        shape = (-1, attn.head_dim)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, shape))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, shape))
        value = attn.to_v(hidden_states).unflatten(-1, shape)
        if encoder_hidden_states is not None:
            text_query = attn.norm_added_q(
                attn.add_q_proj(encoder_hidden_states).unflatten(-1, shape)
            )
            text_key = attn.norm_added_k(
                attn.add_k_proj(encoder_hidden_states).unflatten(-1, shape)
            )
            text_value = attn.add_v_proj(encoder_hidden_states).unflatten(-1, shape)
            query = torch.cat([text_query, query], 1)
            key = torch.cat([text_key, key], 1)
            value = torch.cat([text_value, value], 1)
        cos, sin = image_rotary_emb
        query = rotate(query, cos, sin).to(value.dtype)
        key = rotate(key, cos, sin).to(value.dtype)
        out = _attention(query, key, value).flatten(2)
        if encoder_hidden_states is None:
            return out
        length = encoder_hidden_states.shape[1]
        text, image = out[:, :length], out[:, length:]
        return attn.to_out[0](image), attn.to_add_out(text)


def blocks_of(transformer: Any) -> list[Any]:
    """All blocks, double ones first."""
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def prepare(transformer: Any) -> None:
    """Give every attention the processor above."""
    for block in blocks_of(transformer):
        block.attn.set_processor(FastProcessor())


class CompileSwitch:
    """Turns the compiled forward of every block on and off."""

    def __init__(self, transformer: Any) -> None:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64
        self.blocks = blocks_of(transformer)
        self.compiled = [torch.compile(block.forward, dynamic=False) for block in self.blocks]
        self.is_on = False

    def set(self, on: bool) -> None:
        """Use the compiled blocks from the next call on, or the plain ones."""
        if on == self.is_on:
            return
        for block, compiled in zip(self.blocks, self.compiled, strict=True):
            if on:
                block.forward = compiled
            else:
                del block.forward
        self.is_on = on
