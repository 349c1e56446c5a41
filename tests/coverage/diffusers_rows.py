"""Patches one tiny family and tells what was found: which layers, by which way, with which masks,
and whether every SDPA call of the model went through them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from diffusers_family import Family, Inputs, forward
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sagepatch.patchers.diffusers_processors import Route, way_of
from sagepatch.patchers.model import Parts, search
from sagepatch.patchers.site import Found, Site

if TYPE_CHECKING:
    from models.patching import Patched

WAYS = {
    Route.DISPATCH: "dispatcher",
    Route.SDPA: "processor's SDPA",
    None: "module's SDPA",
}


def find(model: nn.Module, prefix: str) -> Found:
    """Every attention layer, as `apply` looks for them."""
    return search(Parts(type(model).__name__, {prefix: model}))


def way(site: Site) -> str:
    """By which way a site reaches the op."""
    route = way_of(site.module.processor).route if site.patcher == "diffusers" else None
    return WAYS[route]


class SdpaCalls(TorchFunctionMode):
    """Counts the calls of torch's SDPA while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Ran:
    """One forward of a patched model."""

    out: Tensor
    patched: Patched


@dataclass(frozen=True, slots=True)
class Row:
    """What patching one tiny model found and did.

    `reference` and `after` are outputs before the patch and after its restore; `sdpa_calls` counts
    torch's SDPA in the unpatched forward.
    """

    reference: Tensor
    after: Tensor
    sdpa_calls: int
    ways: tuple[str, ...]
    kinds: tuple[str, ...]
    masks: tuple[str, ...]
    left: tuple[str, ...]
    runs: dict[str, Ran]


EXACT, SAFE, FAST = "sdpa.exact", "emulated.sage1_b_f32", "emulated.sage2_8"


@functools.cache
def row_of(family: Family, variants: tuple[str, ...] = (EXACT, FAST)) -> Row:
    """Build, run, patch with each variant, run, restore, run."""
    from models.patching import patch_all

    model = family.built()

    def inputs() -> Inputs:
        return family.inputs(model.config, family.small)

    with SdpaCalls() as unpatched:
        reference = forward(model, inputs())
    found = find(model, "")
    runs = {}
    for variant in variants:
        with patch_all(model, variant, finder=find) as patched:
            runs[variant] = Ran(forward(model, inputs()), patched)
    seen = {spec.mask.value for layer in patched.layers.values() for spec in layer.record.specs}
    return Row(
        reference,
        forward(model, inputs()),
        unpatched.count,
        tuple(sorted({way(site) for site in found.sites})),
        tuple(sorted({layer.kind for layer in (*found.sites, *found.left)})),
        tuple(sorted(seen)),
        tuple(dict.fromkeys(left.reason for left in found.left)),
        runs,
    )
