"""`torch.ops.sagepatch.attention`: the one opaque operation behind which every kernel sits, and its
fake.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.backends.selfcheck import failure
from sagepatch.dispatch import Request, select
from sagepatch.errors import KernelUnavailable, StrictFallback
from sagepatch.layer import PatchedLayer, find_layer
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

_LIBRARY = torch.library.Library("sagepatch", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? handle, float scale, int? causal_offset, "
    "int? window, float? softcap, str variant, bool bshd_out, bool return_lse) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    handle: Tensor | None,
    scale: float,
    causal_offset: int | None,
    window: int | None,
    softcap: float | None,
    variant: str,
    bshd_out: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    call = Call(
        q,
        k,
        v,
        scale,
        attn_mask,
        causal_offset,
        window,
        softcap,
        sinks,
        cu_seqlens_q,
        cu_seqlens_kv,
        bshd_out,
        return_lse,
    )
    if handle is not None:
        layer = find_layer(handle)
        out, lse = run_exact(call) if layer is None else run_layer(layer, call)
    else:
        out, lse = run_variant(chosen_for(call.spec(), variant), call)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    handle: Tensor | None,
    scale: float,
    causal_offset: int | None,
    window: int | None,
    softcap: float | None,
    variant: str,
    bshd_out: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    call = Call(q, k, v, scale, bshd_out=bshd_out)
    lse = call.empty_lse() if return_lse else q.new_empty(0, dtype=torch.float32)
    return call.empty_out(), lse


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("sagepatch::attention", _attention_fake, lib=_LIBRARY)


@lru_cache(maxsize=4096)
def chosen_for(spec: AttnSpec, variant: str) -> Variant:
    """The kernel for a call outside any layer; kept, as the trace costs more than a launch."""
    # On a CPU a recipe asked for by name can only mean its emulation.
    named_on_cpu = spec.device == "cpu" and variant in RECIPES
    return select(spec, Request(variant, emulate=named_on_cpu), unusable, prove=failure).variant


def run_variant(variant: Variant, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run one kernel on one call; `call` must be one that the variant does not reject."""
    return load(variant.entry)(call, variant.recipe)


def run_exact(call: Call) -> tuple[Tensor, Tensor | None]:
    """Run exact attention."""
    return run_variant(SDPA, call)


def run_layer(layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run one call of a patched layer: observe it, run its kernel, or run exact and count why."""
    spec = call.spec()
    observer = layer.observer
    if observer is not None:
        seen = observer(layer, call)
        if seen is not None:
            layer.record.ran(spec, SDPA.name)
            return seen
    variant, fallback = layer.choose(spec)
    layer.record.ran(spec, variant.name)
    if fallback is not None:
        layer.record.fell_back(fallback)
    guard = None if variant is SDPA else layer.guard(call.q.device)
    try:
        if guard is not None:
            out, lse = guard.run(variant, call)
            layer.heed(guard.verdict(), variant.name)
            return out, lse
        out, lse = run_variant(variant, call)
    except KernelUnavailable as error:
        if layer.policy.strict:
            raise StrictFallback(layer.name, variant.name, (str(error),)) from error
        layer.demote(str(error))
        layer.record.fell_back(f"demoted: {error}")
        return run_exact(call)
    except Exception as error:
        error.add_note(f"raised by {variant.name} in layer {layer.name} on {spec}")
        raise
    if variant is SDPA or not _guarded_now(layer, call) or _finite(out):
        return out, lse
    if not _inputs_finite(call):
        return out, lse
    layer.demote(f"{variant.name} gave a non-finite output on finite inputs")
    layer.record.ran(spec, SDPA.name)
    return run_exact(call)


def _guarded_now(layer: PatchedLayer, call: Call) -> bool:
    guard = layer.policy.guard
    # Off the GPU a check costs no synchronisation, so "auto" checks there and then.
    return guard == "sync" or (guard == "auto" and call.q.device.type == "cpu")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _inputs_finite(call: Call) -> bool:
    return _finite(call.q) and _finite(call.k) and _finite(call.v)
