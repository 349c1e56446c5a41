"""Exact attention: torch's own SDPA where it can say what is asked, its flash attention where only
a log-sum-exp is asked for beyond that, `numerics.exact` elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagepatch.numerics.exact import exact
from sagepatch.numerics.masks import merged_mask
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call, arch_of

# torch's own function, not what `torch.nn.functional` has under that name: if somebody has put a
# wrapper there, the call came through it on its way here.
_SDPA = torch._C._nn.scaled_dot_product_attention


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Exact attention on any call, differentiable; `recipe` is always EXACT."""
    beyond_sdpa = (
        call.return_lse or call.softcap is not None or call.sinks is not None or call.packed
    )
    if beyond_sdpa:
        if _flash_serves(call):
            return _flash(call)
        wide = torch.float64 in (call.q.dtype, call.k.dtype, call.v.dtype)
        out, lse = exact(call, torch.float64 if wide else torch.float32)
        out = out.to(call.v.dtype)
        return _in_layout(out, call), lse.float() if call.return_lse else None
    q, k, v = call.q, call.k, call.v
    dtype = q.dtype
    if not dtype == k.dtype == v.dtype:
        dtype = torch.promote_types(torch.promote_types(dtype, k.dtype), v.dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    plain_causal = call.causal_offset == 0 and call.window is None and call.attn_mask is None
    mask = call.attn_mask if call.causal_offset is None or plain_causal else merged_mask(call)
    if mask is not None:
        mask = _narrowed(mask, dtype)
        while mask.dim() < 2:  # SDPA wants to see both axes
            mask = mask[None]
    out = _SDPA(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=plain_causal,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )
    out = out if dtype == call.v.dtype else out.to(call.v.dtype)
    return _in_layout(out, call), None


def _flash_serves(call: Call) -> bool:
    """Whether torch's flash attention, which gives a log-sum-exp, can say what is asked: a plain
    call without derivatives, in FP16 or BF16 on a GPU, in FP32 on a CPU.
    """
    q, k, v = call.q, call.k, call.v
    plain = (call.attn_mask, call.causal_offset, call.window, call.softcap, call.sinks)
    if call.packed or not call.return_lse or any(option is not None for option in plain):
        return False
    if not q.dtype == k.dtype == v.dtype or q.shape[1] != k.shape[1] or k.shape != v.shape:
        return False
    if 0 in q.shape or 0 in k.shape:
        return False
    # Neither a backward through the log-sum-exp nor a tangent.
    if forward_ad._current_level >= 0 or (torch.is_grad_enabled() and _any_requires_grad(q, k, v)):
        return False
    if q.device.type == "cpu":
        return q.dtype == torch.float32
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return q.device.type == "cuda" and half and fits and (arch_of(q.device) or 0) >= 80


def _any_requires_grad(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _flash(call: Call) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    on_cpu = call.q.device.type == "cpu"
    flash = (
        aten._scaled_dot_product_flash_attention_for_cpu
        if on_cpu
        else aten._scaled_dot_product_flash_attention
    )
    out, lse, *_ = flash(call.q, call.k, call.v, scale=call.scale)
    return _in_layout(out, call), lse.contiguous()


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
