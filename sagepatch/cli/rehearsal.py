"""What `--strict` asks for: a named variant must serve every layer, known before the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        refusals = [
            (layer.name, reason)
            for layer in patch.layers
            for reason in refused_calls(layer, request)
        ]
        refusals += [(left.name, left.reason) for left in patch.left]
    if refusals:
        reasons = [f"layer {name!r}: {reason}" for name, reason in refusals]
        raise VariantRefused(request.variant, reasons, "; ".join(by_reason(refusals)))


def by_reason(refusals: Sequence[tuple[str, str]]) -> list[str]:
    """Layers and why nothing serves them, those of one reason together.

    >>> by_reason([("a.0", "no GPU"), ("a.1", "no GPU"), ("b", "short")])
    ['layers a.0, a.1: no GPU', 'layer b: short']
    """
    found: dict[str, list[str]] = {}
    for name, reason in refusals:
        found.setdefault(reason, []).append(name)
    told = []
    for reason, names in found.items():
        listed = ", ".join(names[:SHOWN_LAYERS])
        if len(names) > SHOWN_LAYERS:
            listed += f" and {len(names) - SHOWN_LAYERS} more"
        told.append(f"layer{'s' * (len(names) > 1)} {listed}: {reason}")
    return told


def refused_calls(layer: PatchedLayer, request: Request) -> list[str]:
    """One sentence for each kind of call of this layer that nothing in `request` can serve."""
    found = []
    for spec in layer.record.specs:
        if spec.q_len == 1 and not request.by_full_name:
            continue
        decisions = candidates(spec, request, layer.unusable)
        if all(decision.reasons for decision in decisions):
            reasons = dict.fromkeys(r for decision in decisions for r in decision.reasons)
            found.append(f"of {spec}: {', '.join(reasons)}")
    return found
