"""`torch.ops.sagepatch.attention`: the one opaque operation behind which every kernel sits, and its
fake.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from sagepatch.backends import load, unusable
from sagepatch.backends.catalogue import SDPA
from sagepatch.backends.prepared import (
    Addresses,
    addresses_of,
    again,
    comes_again,
    find,
    kind_of,
    look_of,
)
from sagepatch.backends.selfcheck import failure
from sagepatch.bounded import Bounded
from sagepatch.dispatch import Request, select
from sagepatch.errors import InvalidArgument, KernelUnavailable, StrictFallback
from sagepatch.layer import PatchedLayer, Way, capturing, find_layer
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant

_LIBRARY = torch.library.Library("sagepatch", "DEF")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? handle, float scale, "
    # Of a cache that grows these follow from lengths: an int would be a graph for each length.
    "SymInt? causal_offset, SymInt? window, float? softcap, str variant, bool bshd_out, "
    "bool return_lse) "
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
    out, lse = serve(call, handle, variant)
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


def serve(call: Call, handle: Tensor | None, variant: str) -> tuple[Tensor, Tensor | None]:
    """What the op does: run the call as the layer with this handle would, or by `variant` without
    one. Output, and the log-sum-exp where one is asked for.
    """
    cu_q, cu_kv, sinks = call.cu_seqlens_q, call.cu_seqlens_kv, call.sinks
    if sinks is not None or cu_q is not None:
        # Kernels walk rows of one number an entry without looking at strides, and read 32 bits.
        sinks = None if sinks is None else sinks.contiguous()
        cu_q, cu_kv = (None if t is None else t.to(torch.int32).contiguous() for t in (cu_q, cu_kv))
        call = replace(call, sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    if cu_q is not None and cu_kv is not None:
        check_rising("cu_seqlens_q", cu_q, call.q.shape[2])
        check_rising("cu_seqlens_kv", cu_kv, call.k.shape[2])
    if handle is None:
        return run_variant(chosen_for(call.spec(), variant), call)
    layer = find_layer(handle)
    return run_exact(call) if layer is None else run_layer(layer, call)


def needs_op(call: Call) -> bool:
    """Whether a call has to go through `torch.ops.sagepatch.attention`: a compiler traces it, or
    `tensors_need_op` says so of its tensors. Any other call is cheaper without, as the op's
    dispatch costs the host more than a launch.
    """
    mask, sinks = call.attn_mask, call.sinks
    return (
        torch.compiler.is_compiling()
        or tensors_need_op(call.q, call.k, call.v)
        or (mask is not None and not plain(mask))
        or (sinks is not None and not plain(sinks))
    )


def tensors_need_op(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call of these tensors needs the op even where no compiler traces it: torch's
    operations are watched, or a tensor is a subclass or not `plain`.
    """
    return (
        not type(q) is type(k) is type(v) is Tensor
        or not plain(q)
        or not plain(k)
        or not plain(v)
        or operations_are_watched()
    )


def operations_are_watched() -> bool:
    """Whether something other than a compiler sees each operation that torch runs: a tracer, a
    function or dispatch mode, a transform of torch.func, the profiler.
    """
    return (
        _len_torch_dispatch_stack() > 0
        or _get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or (
            _len_torch_function_stack() > 0
            and any(not isinstance(m, DeviceContext) for m in _get_current_function_mode_stack())
        )
        or _profiler_enabled()
    )


def plain(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are what lies at its address, by its strides. (Of one that
    `is_neg`, as the imaginary part of a conjugated tensor is, they are the negatives of that.)
    """
    return not (
        tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_neg()
    )


_CHOSEN: Bounded[tuple[AttnSpec, str], Variant] = Bounded(4096)


def chosen_for(spec: AttnSpec, variant: str) -> Variant:
    """The kernel for a call outside any layer; kept, as the trace costs more than a launch."""
    found = _CHOSEN.get((spec, variant))
    if found is None:
        # On a CPU a recipe asked for by name can only mean its emulation.
        request = Request(variant, emulate=spec.device == "cpu" and variant in RECIPES)
        # A graph would keep an unchecked kernel for good, and no layer's report would say so.
        found = select(
            *(spec, request, unusable),
            prove=lambda variant: failure(variant, spec.gpu, unchecked_in_graphs=False),
        ).variant
        # Nothing could be checked during a capture: ask again at the next call.
        if not capturing(spec):
            _CHOSEN[spec, variant] = found
    return found


def run_variant(variant: Variant, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run one kernel on one call; `call` must be one that the variant does not reject."""
    return load(variant.entry)(call, variant.recipe)


def run_exact(call: Call) -> tuple[Tensor, Tensor | None]:
    """Run exact attention."""
    return run_variant(SDPA, call)


def run_layer(layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run one call of a patched layer: as one of its kind ran before, by the layer's observer while
    it calibrates, or by the kernel that it chooses now.
    """
    kind = None
    if settled(layer) and comes_again(call):
        addresses = addresses_of(call)
        kind = kind_of(call, look_of(call.q, call.k, call.v, call.attn_mask, addresses))
        way = layer.ways.get(kind)
        if way is not None:
            return run_known(layer, way, call, addresses)
    spec = call.spec()
    observer = layer.observer
    if observer is not None:
        seen = observer(layer, call)
        if seen is not None:
            layer.record.ran(spec, SDPA.name)
            return seen
    return _run_chosen(layer, call, spec, kind)


def _run_chosen(
    layer: PatchedLayer, call: Call, spec: AttnSpec, kind: tuple[Any, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel that the layer chooses for a call, or exact attention and count why. `kind`:
    under which the way of serving it is remembered, None where it is not.
    """
    ways = layer.ways
    variant, fallback = layer.choose(spec)
    layer.record.ran(spec, variant.name)
    if fallback is not None:
        layer.record.fell_back(fallback)
    guard = None if variant is SDPA else layer.guard(call.q.device)
    try:
        if guard is not None:
            out, lse = guard.run(variant, call)
            layer.heed(guard.verdict(), variant.name)
        else:
            out, lse = run_variant(variant, call)
    except KernelUnavailable as error:
        if layer.policy.strict:
            raise StrictFallback(layer.name, variant.name, (str(error),)) from error
        layer.demote(str(error))
        layer.record.ran_exact_instead(variant.name, SDPA.name, f"demoted: {error}")
        return run_exact(call)
    except Exception as error:
        error.add_note(f"raised by {variant.name} in layer {layer.name} on {spec}")
        raise
    if kind is not None and not capturing(spec):
        prepared = None
        if variant is not SDPA:
            flags = None if guard is None else guard.flags
            prepared = find(variant.toolchain, call, variant.recipe, flags)
        if prepared is not None or variant is SDPA:
            ways[kind] = Way(spec, variant.name, prepared, guard, fallback)
    if guard is not None or variant is SDPA or not _host_checks(layer, call) or _finite(out):
        return out, lse
    return _exact_instead(layer, call, variant)


def _exact_instead(
    layer: PatchedLayer, call: Call, variant: Variant
) -> tuple[Tensor, Tensor | None]:
    """Exact attention for a call on which `variant` was not finite. Where this is finite, the layer
    is demoted; under `strict=True` that raises.
    """
    exact, exact_lse = run_exact(call)
    if not _finite(exact):
        layer.heed("inputs", variant.name)
        layer.record.ran_exact_instead(variant.name, SDPA.name, "inputs were not finite")
        return exact, exact_lse
    layer.heed("kernel", variant.name)
    if layer.policy.strict:
        raise StrictFallback(layer.name, variant.name, (f"demoted: {layer.demoted}",))
    layer.record.ran_exact_instead(variant.name, SDPA.name, f"demoted: {layer.demoted}")
    return exact, exact_lse


def settled(layer: PatchedLayer) -> bool:
    """Whether a layer serves all calls of one kind alike, so that how it served the first can be
    remembered: it does not calibrate, its plan is one for the whole schedule, and no call's output
    is looked at by the host.
    """
    return layer.observer is None and not layer.parts and layer.policy.guard != "sync"


def run_known(
    layer: PatchedLayer, way: Way, call: Call, addresses: Addresses
) -> tuple[Tensor, Tensor | None]:
    """Run a call of a kind that the layer served before; `addresses` are those of its tensors."""
    prepared, guard = way.prepared, way.guard
    layer.record.ran(way.spec, way.runs)
    if way.fallback is not None:
        layer.record.fell_back(way.fallback)
    try:
        if prepared is None:
            return run_exact(call)
        if guard is None:
            return again(prepared, addresses, call.scale)
        out, lse = again(prepared, addresses, call.scale, guard.flags)
        layer.heed(guard.verdict(), way.runs)
        return out, lse
    except Exception as error:
        error.add_note(f"raised by {way.runs} in layer {layer.name} on {way.spec}")
        raise


def _host_checks(layer: PatchedLayer, call: Call) -> bool:
    """Whether the host looks at the output of this call before it goes on."""
    guard = layer.policy.guard
    # Off the GPU a check costs no synchronisation, so "auto" checks there and then.
    return guard == "sync" or (guard == "auto" and call.q.device.type == "cpu")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def check_rising(name: str, offsets: Tensor, total: int) -> None:
    """Refuse cumulative lengths that do not rise from 0 to `total`. On a GPU looking would make the
    host wait: there callers vouch for them.
    """
    if offsets.device.type != "cpu":
        return
    steps = offsets.tolist()
    if steps[0] != 0 or steps[-1] != total or any(a > b for a, b in pairwise(steps)):
        raise InvalidArgument(
            f"{name} must rise from 0 to the total of {total} tokens, found {steps}"
        )
