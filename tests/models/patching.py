"""Patches every layer that a finder finds in a model, for tests that need no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from torch import nn

from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.patchers import diffusers
from sagepatch.patchers.site import Found, Swap

Finder = Callable[[nn.Module, str], Found]


@dataclass
class Patched:
    """Layers under patch by their site's name, and what takes the patch back."""

    found: Found
    layers: dict[str, PatchedLayer]
    swaps: dict[str, Swap]

    def restore(self) -> None:
        for swap in self.swaps.values():
            swap.undo()

    def calls(self) -> list[int]:
        """Calls of each layer so far, in the order of the model."""
        return [layer.record.calls for layer in self.layers.values()]

    def ran(self) -> Counter[str]:
        """Calls by kernel over all layers."""
        return sum((layer.record.by_variant for layer in self.layers.values()), Counter())

    def fallbacks(self) -> Counter[str]:
        """Calls that ran exact attention, by reason, over all layers."""
        return sum((layer.record.fallbacks for layer in self.layers.values()), Counter())

    def replaced(self) -> set[str]:
        """What took the place of the patch anywhere."""
        return {name for swap in self.swaps.values() if (name := swap.replaced_by()) is not None}

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def patch_all(
    model: nn.Module,
    variant: str,
    *,
    prefix: str = "",
    finder: Finder = diffusers.find,
    policy: Policy | None = None,
) -> Patched:
    """Install every site of `model` with a layer that runs `variant`, emulated ones included."""
    found = finder(model, prefix)
    layers, swaps = {}, {}
    for site in found.sites:
        layer = PatchedLayer(
            site.name, site.kind, policy or Policy(emulate=True), Request(variant, True), unusable
        )
        layers[site.name] = layer
        swaps[site.name] = site.install(layer)
    return Patched(found, layers, swaps)
