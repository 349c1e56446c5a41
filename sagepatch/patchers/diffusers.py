"""diffusers models: finds every layer with an attention processor and routes its instance to the
op.

Two ways in, by what the processor's code calls: `dispatch_attention_fn` (the class is re-created
with a private one) or torch's SDPA (the call runs inside `SdpaRedirect`). Classes of diffusers are
never touched.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from sagepatch.layer import PatchedLayer, SiteKind
from sagepatch.patchers.processors import Route, patched_copy, route_of
from sagepatch.patchers.sdpa import named_modules
from sagepatch.patchers.site import Found, Left, Site, Swap

# Processors whose layers mix text and image tokens in one sequence without any sign of it on the
# module.
_JOINT_PROCESSORS = frozenset(
    {
        "CogVideoXAttnProcessor2_0",
        "CogVideoXAttnProcessor",
        "FluxAttnProcessor",
        "Flux2AttnProcessor",
        "Flux2ParallelSelfAttnProcessor",
        "HunyuanVideoAttnProcessor2_0",
        "AuraFlowAttnProcessor2_0",
        "HiDreamAttnProcessor",
        "ZSingleStreamAttnProcessor",
    }
)
_ADDED_PROJECTIONS = ("add_q_proj", "to_add_q", "add_qkv_proj")


def find(model: nn.Module, prefix: str) -> Found:
    """Every module of `model` that carries an attention processor; names are prefix, a dot, the
    module path.
    """
    sites: list[Site] = []
    left: list[Left] = []
    for name, module in named_modules(model, prefix):
        processor = module.__dict__.get("processor") or module._modules.get("processor")
        if processor is None:
            continue
        kind = kind_of(name, module, processor)
        route, reason = route_of(type(processor))
        if route is Route.NONE:
            left.append(Left(name, kind, reason))
        else:
            install_here = functools.partial(install, module, route=route)
            sites.append(Site(name, kind, module, "diffusers", install_here))
    return Found(tuple(sites), tuple(left))


def kind_of(name: str, module: nn.Module, processor: object) -> SiteKind:
    """Self, cross or joint attention, from what the module says of itself."""
    if type(processor).__name__ in _JOINT_PROCESSORS:
        return "joint"
    if getattr(module, "is_cross_attention", False):
        return "cross"
    if any(getattr(module, projection, None) is not None for projection in _ADDED_PROJECTIONS):
        return "joint"
    if name.rpartition(".")[2] in ("attn2", "cross_attn"):
        return "cross"
    return "self"


def install(module: nn.Module, layer: PatchedLayer, *, route: Route) -> Swap:
    """Give this one instance a processor that reaches `layer`; the processor it had comes back on
    undo.
    """
    original: Any = module.processor
    ours = patched_copy(original, layer.handle, route)
    module.processor = ours

    def replaced_by() -> str | None:
        current = module.processor
        return None if current is ours else type(current).__name__

    def undo() -> None:
        if module.processor is ours:
            module.processor = original

    return Swap(undo, replaced_by)
