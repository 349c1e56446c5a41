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
        wide = torch.float64 in (call.q.dtype, call.k.dtype, call.v.dtype)
        out, lse = exact(call, torch.float64 if wide else torch.float32)
        out = out.to(call.v.dtype)
        return _in_layout(out, call), lse.float() if call.return_lse else None
    dtype = torch.promote_types(torch.promote_types(call.q.dtype, call.k.dtype), call.v.dtype)
    plain_causal = call.causal_offset == 0 and call.window is None and call.attn_mask is None
    mask = call.attn_mask if call.causal_offset is None or plain_causal else merged_mask(call)
    if mask is not None:
        mask = _narrowed(mask, dtype)
        while mask.dim() < 2:  # SDPA wants to see both axes
            mask = mask[None]
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


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in a dtype that SDPA takes; only -inf stays -inf.

    The lowest number of a wider dtype would become -inf, and a row of such numbers zeros. On a CPU
    SDPA takes FP32 masks as they are, so that such a row gives the mean of V.
    """
    if not mask.is_floating_point() or mask.dtype == dtype:
        return mask
    lowest = torch.finfo(dtype).min
    if torch.finfo(mask.dtype).min >= lowest:
        return mask.to(dtype)
    if mask.dtype == torch.float32 and mask.device.type == "cpu":
        return mask
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=lowest)).to(dtype)


def _in_layout(out: Tensor, call: Call) -> Tensor:
    """`out` in the memory order that the op promises: [B, Hq, Sq, Dv] or [B, Sq, Hq, Dv]
    contiguous.
    """
    if call.bshd_out:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
