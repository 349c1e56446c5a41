"""diffusers models: finds every layer with an attention processor and routes its instance to the
op.

Two ways in, by what the processor's code calls: `dispatch_attention_fn` (the class is re-created
with a private one) or torch's SDPA (the call runs inside `SdpaRedirect`). Classes of diffusers are
never touched.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from sagepatch.layer import PatchedLayer, SiteKind
from sagepatch.patchers.carrier import ATTRIBUTE, Carrier
from sagepatch.patchers.code import names_in, own_forward
from sagepatch.patchers.diffusers_copies import (
    behind,
    in_force,
    original_of,
    patched_copy,
    retire,
    strays,
)
from sagepatch.patchers.diffusers_processors import Route, Way, backend_name, elsewhere, way_of
from sagepatch.patchers.parallel import name_handle
from sagepatch.patchers.sdpa import named_modules
from sagepatch.patchers.site import Found, Left, Site, Swap

# Processors whose layers attend over text and image in one sequence, with no sign of it on the
# module: single-stream blocks, and models that concatenate before or inside the processor.
_JOINT = frozenset(
    {
        "AttnAddedKVProcessor",
        "AttnAddedKVProcessor2_0",
        "AuraFlowAttnProcessor2_0",
        "BriaAttnProcessor",
        "BriaFibo2AttnProcessor",
        "BriaFiboAttnProcessor",
        "CogVideoXAttnProcessor2_0",
        "CogView4AttnProcessor",
        "CogView4TrainingAttnProcessor",
        "Cosmos3AttnProcessor",
        "EasyAnimateAttnProcessor2_0",
        "ErnieImageSingleStreamAttnProcessor",
        "Flux2AttnProcessor",
        "Flux2KVAttnProcessor",
        "Flux2KVParallelSelfAttnProcessor",
        "Flux2ParallelSelfAttnProcessor",
        "Flux3AttnProcessor",
        "FluxAttnProcessor",
        "FluxIPAdapterAttnProcessor",
        "FusedAuraFlowAttnProcessor2_0",
        "FusedCogVideoXAttnProcessor2_0",
        "GlmImageAttnProcessor",
        "HiDreamAttnProcessor",
        "HunyuanImageAttnProcessor",
        "HunyuanVideo15AttnProcessor2_0",
        "HunyuanVideoAttnProcessor2_0",
        "Ideogram4AttnProcessor",
        "JoyImageAttnProcessor",
        "JoyImageEditPlusAttnProcessor",
        "Krea2AttnProcessor",
        "LongCatImageAttnProcessor",
        "Lumina2AttnProcessor2_0",
        "MiniMaxH3AttnProcessor",
        "MotifVideoAttnProcessor2_0",
        "NucleusMoEAttnProcessor2_0",
        "OmniGenAttnProcessor2_0",
        "OvisImageAttnProcessor",
        "PRXAttnProcessor2_0",
        "QwenImage21AttnProcessor",
        "QwenImage21FlexAttnProcessor",
        "ZSingleStreamAttnProcessor",
    }
)
# Projections that a module has for the queries of a second stream.
_SECOND_STREAM = ("add_q_proj", "to_add_q", "to_added_qkv")
_CROSS_PLACES = ("attn2", "cross_attn", "cross_attention", "attn_cross")


def find(model: nn.Module, prefix: str) -> Found:
    """Every module of `model` that calls an attention processor of its own.

    Names are prefix, a dot, the module path. A layer that cannot be served is left with the reason.
    """
    sites: list[Site] = []
    left: list[Left] = []
    for name, module in named_modules(model, prefix):
        if not calls_processor(module):
            continue
        processor = behind(module.processor)
        kind = kind_of(name, module, processor)
        way = way_of(processor)
        if way.route is Route.NONE:
            left.append(Left(name, kind, way.reason))
        else:
            install_here = functools.partial(install, module, way)
            sites.append(Site(name, kind, module, "diffusers", install_here))
    return Found(tuple(sites), tuple(left))


def calls_processor(module: nn.Module) -> bool:
    """Whether this module's own forward hands its attention to a `processor` attribute."""
    forward = own_forward(type(module))
    return (
        forward is not None
        and "processor" in names_in(forward.__code__)
        and callable(getattr(module, "processor", None))
    )


def kind_of(name: str, module: nn.Module, processor: object) -> SiteKind:
    """Self, cross or joint attention, from what the module says of itself."""
    words = f"{type(module).__name__} {type(processor).__name__}".lower()
    crosses = "cross" in words.replace("crossframe", "")
    at_cross_place = name.rpartition(".")[2] in _CROSS_PLACES
    flag = getattr(module, "is_cross_attention", None)
    # The flag only says that somebody gave a width for the keys, be it the queries' own.
    if crosses or (flag and (at_cross_place or _reads_other_width(module))):
        return "cross"
    if any(getattr(module, projection, None) is not None for projection in _SECOND_STREAM):
        return "joint"
    if flag is None and (at_cross_place or _reads_other_width(module)):
        return "cross"
    # A refiner runs a joint model's processor over one stream alone.
    joint = type(processor).__name__ in _JOINT and "refiner" not in name
    return "joint" if joint else "self"


def _reads_other_width(module: nn.Module) -> bool:
    queries, keys = (getattr(module, name, None) for name in ("to_q", "to_k"))
    width = "in_features"
    return (
        hasattr(queries, width)
        and hasattr(keys, width)
        and getattr(queries, width) != getattr(keys, width)
    )


def install(module: nn.Module, way: Way, layer: PatchedLayer) -> Swap:
    """Give this one instance a processor that reaches `layer`; what it had comes back on undo."""
    handle = layer.handle
    original = original_of(module.processor)
    ours = patched_copy(original, handle, way.route)
    before = getattr(original, "_attention_backend", None)
    unname = name_handle(handle, before, ours) if way.route is Route.DISPATCH else None
    layer.module = weakref.ref(module)
    carrier = None
    if way.route is Route.SDPA:
        carrier = Carrier(handle)
        setattr(module, ATTRIBUTE, carrier)
    _put(module, ours)

    def undo() -> None:
        if carrier is not None and module.__dict__.get(ATTRIBUTE) is carrier:
            delattr(module, ATTRIBUTE)
        if module.processor is ours or strays(module.processor, module):
            _put(module, original_of(module.processor))
        # Whoever kept it (diffusers does, to take a fusion back) now holds the original's like.
        retire(ours)
        if unname is not None:
            unname()

    def replaced_by() -> str | None:
        if module.processor is not ours:
            return type(module.processor).__name__
        if not in_force(ours, module, handle):
            return f"attention backend {backend_name(ours) or 'default'}"
        backend = elsewhere(ours) if way.dispatched else None
        return None if backend is None else f"attention backend {backend}"

    return Swap(undo, replaced_by)


def _put(module: nn.Module, processor: Any) -> None:
    # A processor with weights is a submodule and keeps its place among them; others are attributes.
    holder = module._modules if "processor" in module._modules else module.__dict__
    holder["processor"] = processor
