"""What `--strict` asks for: a named variant must serve every layer, known before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sagepatch.api import apply
from sagepatch.dispatch import Request, candidates
from sagepatch.errors import VariantRefused
from sagepatch.layer import PatchedLayer

SHOWN_LAYERS = 20


def rehearse(model: Any, run_briefly: Callable[[], object], request: Request) -> None:
    """Run one exact step, then raise `VariantRefused` with every layer that `request` cannot serve.

    The model comes back unpatched.
    """
    with apply(model, variant="exact") as patch:
        run_briefly()
        refusals = [reason for layer in patch.layers for reason in refused_calls(layer, request)]
        refusals += [f"layer {left.name!r}: {left.reason}" for left in patch.left]
    if refusals:
        more = len(refusals) - SHOWN_LAYERS
        shown = refusals[:SHOWN_LAYERS] + ([f"and {more} more"] if more > 0 else [])
        raise VariantRefused(request.variant, shown)


def refused_calls(layer: PatchedLayer, request: Request) -> list[str]:
    """One sentence for each kind of call of this layer that nothing in `request` can serve."""
    found = []
    for spec in layer.record.specs:
        if spec.q_len == 1 and not request.by_full_name:
            continue
        decisions = candidates(spec, request, layer.unusable)
        if all(decision.reasons for decision in decisions):
            reasons = dict.fromkeys(r for decision in decisions for r in decision.reasons)
            found.append(f"layer {layer.name!r} ({spec}): {', '.join(reasons)}")
    return found
