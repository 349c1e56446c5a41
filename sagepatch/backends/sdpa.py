"""Exact attention: torch's own SDPA where it can say what is asked, its flash attention where only
a log-sum-exp is asked for beyond that, `numerics.exact` elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

from sagepatch.numerics.exact import exact
from sagepatch.numerics.masks import merged_mask
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call, arch_of

# torch's own function, not what `torch.nn.functional` has under that name: if somebody has put a
# wrapper there, the call came through it on its way here.
_SDPA = torch._C._nn.scaled_dot_product_attention


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Exact attention on any call, differentiable; `recipe` is always EXACT."""
    if not call.scale > 0:
        # torch's flash kernels hide keys and look for the maximum before they multiply by it.
        sign, scale = (-1, -call.scale) if call.scale < 0 else (0, 1.0)
        call = replace(call, q=call.q * sign, scale=scale)
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
    B, Hq, Sq, D = q.shape
    Hkv, Dv = v.shape[1], v.shape[3]
    shared = Hq // max(Hkv, 1)
    gqa = shared > 1 and takes_shared_heads(q.device.type, mask is not None, D, Dv)
    packed = False
    if shared > 1 and not gqa:
        # Heads that share a key head are queries of one head, where there is one query. A graph
        # that looked for that would not serve other lengths.
        packed = not plain_causal and not torch.compiler.is_compiling() and Sq == 1
        if packed:
            q, mask = q.reshape(B, Hkv, shared, D), _packed(mask, shared)
        else:
            k, v = _repeated(k, shared), _repeated(v, shared)
    out = _SDPA(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=plain_causal,
        scale=call.scale,
        enable_gqa=gqa,
    )
    out = out.reshape(B, Hq, 1, Dv) if packed else out
    out = out if dtype == call.v.dtype else out.to(call.v.dtype)
    return _in_layout(out, call), None


def takes_shared_heads(device: str, masked: bool, D: int, Dv: int) -> bool:
    """Whether a kernel of torch's SDPA on this type of device takes fewer key heads than query
    heads; elsewhere it falls to plain products, which hold all scores at once. As transformers
    decides it (`integrations/sdpa_attention.py`), so that a layer makes the call it made before.
    """
    if device == "xpu":
        return True
    if device == "mps":
        return bool(TorchVersion(torch.__version__) >= "2.13")
    return not masked and D == Dv <= 256


def _packed(mask: Tensor | None, shared: int) -> Tensor | None:
    """The mask of one query with the heads that share a key head in the place of queries."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] == 1:
        return mask
    *batch, Hq, _, keys = mask.shape
    return mask.reshape(*batch, Hq // shared, shared, keys)


def _repeated(tensor: Tensor, shared: int) -> Tensor:
    """Keys or values [B, Hkv, Skv, D] once for every query head [B, Hkv * shared, Skv, D]."""
    B, Hkv, Skv, D = tensor.shape
    return tensor[:, :, None].expand(B, Hkv, shared, Skv, D).reshape(B, Hkv * shared, Skv, D)


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
    # It walks the last axis without looking at its stride.
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (call.q, call.k, call.v))
    out, lse, *_ = flash(q, k, v, scale=call.scale)
    return _in_layout(out, call), lse.contiguous()


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in a dtype that SDPA takes; only -inf stays -inf.

    The lowest number of a wider dtype would become -inf, and a row of such numbers zeros; the
    lowest of FP16 in its place would leave such a row its scores, as SDPA adds in FP32. On a CPU
    SDPA takes FP32 masks as they are, so that such a row gives the mean of V.
    """
    if not mask.is_floating_point() or mask.dtype == dtype:
        return mask
    if torch.finfo(mask.dtype).min >= torch.finfo(dtype).min:
        return mask.to(dtype)
    dtype = torch.float32 if mask.device.type == "cpu" else dtype
    lowest = torch.finfo(dtype).min
    if torch.finfo(mask.dtype).min >= lowest:
        return mask.to(dtype)
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=lowest)).to(dtype)


def _in_layout(out: Tensor, call: Call) -> Tensor:
    """`out` in the memory order that the op promises: [B, Hq, Sq, Dv] or [B, Sq, Hq, Dv]
    contiguous.
    """
    if call.bshd_out:
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()
