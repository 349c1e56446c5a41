"""`sagepatch.attention`: SDPA's signature over our kernels, and the same for a patched layer by its
handle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagepatch.arguments import (
    LEAST,
    MOST,
    check_flags,
    check_options,
    check_packed,
    check_tensors,
    shown,
)
from sagepatch.backends.sdpa import run as run_sdpa
from sagepatch.dispatch import Request
from sagepatch.errors import InvalidArgument
from sagepatch.known import learn, recall, run_layer_again, seen_of
from sagepatch.numerics.recipe import EXACT
from sagepatch.ops import needs_op, serve  # registers torch.ops.sagepatch
from sagepatch.spec import Call, check_devices, check_mask, check_shapes, mask_kind

Layout = Literal["BHSD", "BSHD"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    causal_offset: int | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_kv: Tensor | None = ...,
    variant: str = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    causal_offset: int | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_kv: Tensor | None = ...,
    variant: str = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    variant: str = "auto",
    layout: Layout = "BHSD",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot product attention on quantised kernels; the first eight parameters are SDPA's.

    Args:
        q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D], [B, Hkv, Skv, Dv] ("BHSD") or with heads and
            tokens swapped
            ("BSHD"); any strides. 3-dimensional tensors are one batch less, as in SDPA.
        attn_mask: bool (True keeps) or floating point (added to the scaled scores), broadcast to
            [B, Hq, Sq, Skv].
        dropout_p: must be 0.
        is_causal: top-left aligned, as in SDPA. Not together with `attn_mask`.
        scale: multiplies the scores; 1/sqrt(D) by default. Of size 2**-100 to 2**100, or 0.
        enable_gqa: accepted for SDPA's sake; shared key heads are recognised from the shapes.
        causal_offset: hides key j from query i where j > i + causal_offset; needs `is_causal=True`.
            Skv - Sq is the alignment that a key-value cache needs.
        window: keeps each token and the window - 1 before it, so later keys are hidden too.
        softcap: c replaces the scaled scores x by c * tanh(x / c); 2**-100 to 2**100.
        sinks: [Hq], one extra logit a head that takes weight and gives nothing.
        cu_seqlens_q, cu_seqlens_kv: [members + 1] int32 or int64 cumulative lengths of a packed
            call with B = 1.
        variant: "auto", a tier ("fast", "safe", "exact"), a recipe ("sage2_8") or
            "<toolchain>.<recipe>".
        layout: the layout of q, k, v and of the output.
        return_lse: also return the natural log-sum-exp of the scores, [B, Hq, Sq] fp32.

    Returns:
        The output in v's dtype, [B, Hq, Sq, Dv] or [B, Sq, Hq, Dv]; with `return_lse` the pair
        (output, lse).

    Raises:
        InvalidArgument (a ValueError): arguments that do not form one attention call.
        VariantRefused: an explicitly requested kernel cannot serve the call; the text gives every
        reason.

    >>> q = torch.randn(1, 2, 64, 32)
    >>> sagepatch.attention(q, q, q, variant="emulated.sage2_8").shape
    torch.Size([1, 2, 64, 32])
    """
    key = None
    if (
        not torch.compiler.is_compiling()
        and sinks is None
        and cu_seqlens_q is None
        and cu_seqlens_kv is None
        and dropout_p == 0.0
    ):
        seen = seen_of(q, k, v, attn_mask)
        if seen is not None:
            at, look = seen
            key = (
                look,
                is_causal,
                causal_offset,
                window,
                # 1, 1.0 and True are one key, and not one argument.
                type(causal_offset),
                type(window),
                softcap,
                variant,
                layout,
                return_lse,
            )
            try:
                known = recall(key)
            except TypeError:
                # Something in it has no hash, so it is no option; refused below.
                key = known = None
            usual = scale is None or (
                isinstance(scale, float | int) and LEAST <= abs(scale) <= MOST
            )
            if known is not None and usual:
                scale = known.scale if scale is None else float(scale)
                out, lse = known.prepared(at, scale, known.form)
                return out if lse is None else (out, lse)
    if dropout_p != 0.0:
        raise InvalidArgument(
            f"dropout_p is {shown(dropout_p)}; quantised attention has no dropout, pass 0"
        )
    if layout not in ("BHSD", "BSHD"):
        raise InvalidArgument(f"layout is {shown(layout)}, needs 'BHSD' or 'BSHD'")
    check_tensors([("q", q), ("k", k), ("v", v)], needed=True)
    check_tensors([("attn_mask", attn_mask), ("sinks", sinks)])
    check_tensors([("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)])
    check_flags([("enable_gqa", enable_gqa), ("return_lse", return_lse)])
    batched = q.dim() == 4
    if not batched and layout == "BHSD" and q.dim() == k.dim() == v.dim() == 3:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if layout == "BSHD" and q.dim() == k.dim() == v.dim() == 4:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    check_shapes(q, k, v)
    if q.shape[1] == 0 or q.shape[3] == 0:
        raise InvalidArgument(f"q has {q.shape[1]} heads of size {q.shape[3]}, needs 1 or more")
    check_options(q, attn_mask, is_causal, scale, causal_offset, window, softcap, sinks)
    check_devices(
        q, attn_mask=attn_mask, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv
    )
    if attn_mask is not None:
        mask_kind(attn_mask)
        check_mask(attn_mask, q, k)
    if (cu_seqlens_q is None) != (cu_seqlens_kv is None):
        raise InvalidArgument("cu_seqlens_q and cu_seqlens_kv go together")
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        check_packed(q, k, attn_mask, cu_seqlens_q, cu_seqlens_kv)
    Request(variant)
    offset = None
    if is_causal or window is not None:
        # Not `causal_offset or 0`: a graph would be one for offset 0, another for the rest.
        offset = 0 if causal_offset is None else causal_offset
    call = Call(
        q,
        k,
        v,
        1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        attn_mask,
        offset,
        window,
        softcap,
        sinks,
        cu_seqlens_q,
        cu_seqlens_kv,
        layout == "BSHD",
        return_lse,
    )
    out, lse = run(call, variant=variant)
    if key is not None:
        learn(key, call, variant, batched)
    if layout == "BSHD":
        out = out.transpose(1, 2)
    if not batched:
        out = out.squeeze(0)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse if batched else lse.squeeze(0)


def run(
    call: Call, *, handle: Tensor | None = None, variant: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Send a checked call through the op, or through differentiable exact attention where gradients
    are needed. Where no log-sum-exp is asked for, it is None or, from the op, empty.
    """
    if handle is not None and not torch.compiler.is_compiling():
        known = run_layer_again(call, handle)
        if known is not None:
            return known
    call = autocast(call)
    if needs_grad(call):
        if handle is None and variant not in ("auto", "exact"):
            raise InvalidArgument(
                f"variant {variant!r} has no backward and no tangent; "
                "call it under torch.no_grad() or pass variant='exact'"
            )
        return run_sdpa(call, EXACT)
    if not needs_op(call):
        return serve(call, handle, variant)
    result: tuple[Tensor, Tensor] = torch.ops.sagepatch.attention(
        call.q,
        call.k,
        call.v,
        call.attn_mask,
        call.sinks,
        call.cu_seqlens_q,
        call.cu_seqlens_kv,
        handle,
        call.scale,
        call.causal_offset,
        call.window,
        call.softcap,
        variant,
        call.bshd_out,
        call.return_lse,
    )
    return result


AUTOCAST_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def needs_grad(call: Call) -> bool:
    """Whether autograd will want a derivative through this call: a backward, or a tangent of
    forward-mode differentiation (`torch.func.jvp`), which `torch.no_grad()` does not switch off.
    """
    mask, sinks = call.attn_mask, call.sinks
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        given = (call.q, call.k, call.v, mask, sinks)
        if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in given):
            return True
    if not torch.is_grad_enabled():
        return False
    return (
        call.q.requires_grad
        or call.k.requires_grad
        or call.v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


def autocast(call: Call) -> Call:
    """Cast floating-point tensors as `torch.autocast` casts the inputs of SDPA; unchanged outside
    autocast.
    """
    device = call.q.device.type
    # Not torch.amp.is_autocast_available: older compilers cannot trace it.
    if device not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        wide = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if wide and tensor is not None else tensor

    q, k, v = cast(call.q), cast(call.k), cast(call.v)
    assert q is not None
    assert k is not None
    assert v is not None
    return replace(call, q=q, k=k, v=v, attn_mask=cast(call.attn_mask))
