"""Exact attention: torch's own SDPA where it can say what is asked, `numerics.exact` where it
cannot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sagepatch.numerics.attention import exact, merged_mask
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Exact attention on any call, differentiable; `recipe` is always EXACT."""
    beyond_sdpa = (
        call.return_lse or call.softcap is not None or call.sinks is not None or call.packed
    )
    if beyond_sdpa:
        out, lse = exact(call)
        out = out.to(call.v.dtype)
        return _in_layout(out, call), lse if call.return_lse else None
    dtype = torch.promote_types(torch.promote_types(call.q.dtype, call.k.dtype), call.v.dtype)
    plain_causal = call.causal_offset == 0 and call.window is None and call.attn_mask is None
    mask = call.attn_mask if call.causal_offset is None or plain_causal else merged_mask(call)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    out = F.scaled_dot_product_attention(
        call.q.to(dtype),
        call.k.to(dtype),
        call.v.to(dtype),
        attn_mask=mask,
        is_causal=plain_causal,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    return _in_layout(out.to(call.v.dtype), call), None


def _in_layout(out: Tensor, call: Call) -> Tensor:
    """`out` in the memory order that the op promises: [B, Hq, Sq, Dv] or [B, Sq, Hq, Dv]
    contiguous.
    """
    if call.bshd_out:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
