"""What is compared: exact attention, every recipe, the calibrated plan, and baselines; and a model
put under one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

import sagepatch
from benchmarks.quality.baselines import NAMES, baseline
from sagepatch.backends.catalogue import CATALOGUE, EMULATED, SDPA
from sagepatch.errors import SagepatchError
from sagepatch.plan import Plan
from sagepatch.spec import arch_of
from sagepatch.variant import Variant

Group = Literal["exact", "recipe", "plan", "baseline"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One way to run a model's attention. `name` is a recipe's, run by the kernel that would serve
    a user who asks for it, or a baseline's; `plan` belongs to the group of that name.
    """

    name: str
    group: Group
    plan: Plan | None = None

    def kernel(self, device: torch.device) -> str:
        """What runs it on this device, for a table."""
        if self.group == "exact":
            return SDPA.name
        if self.plan is not None:
            counts: dict[str, int] = {}
            for entry in self.plan.entries:
                runs = " then ".join(part.variant for part in entry.ranges) or entry.variant
                counts[runs] = counts.get(runs, 0) + 1
            return "; ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        if self.group == "recipe":
            return variant_of(self, device).name
        found = baseline(self.name, toolchain(device))
        return f"{found.toolchain}, a baseline"


EXACT = Condition("exact", "exact")
# What is measured before a time runs out; the others follow in the catalogue's order.
FIRST = (
    *("sage2_8", "sage2pp_8", "sage1_b", "sage1_t", "sage1_vb", "sage1_vt", "sage2_4", "sage2pp_4"),
    *("sage2_4_f16", "sage2pp_8_d4", "sage2_8b", "sage2_8b_k128"),
)
# A condition that cannot run is reported and left out; torch's and CUDA's errors are RuntimeErrors.
FAILURES = (SagepatchError, RuntimeError)


def toolchain(device: torch.device) -> str:
    """What runs a recipe with a part taken away: Triton on a GPU, the emulator elsewhere."""
    return "triton" if device.type == "cuda" else "emulated"


def recipes(device: torch.device) -> list[Condition]:
    """Every recipe that this device has a kernel or an emulation of."""
    listed = (variant.recipe.name for variant in _serving(device))
    return [Condition(name, "recipe") for name in dict.fromkeys(sorted(listed, key=_weight))]


def _serving(device: torch.device) -> list[Variant]:
    """The kernels that serve on this device, in the catalogue's order; the emulator off a GPU."""
    if device.type != "cuda":
        return list(EMULATED)
    arch = arch_of(device)
    return [
        variant
        for variant in CATALOGUE
        if variant.devices == {"cuda"}
        and variant.withheld is None
        and variant.archs is not None
        and arch in variant.archs
    ]


def _weight(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def baselines() -> list[Condition]:
    """Every baseline."""
    return [Condition(name, "baseline") for name in NAMES]


@contextmanager
def under(condition: Condition, model: Any, device: torch.device) -> Iterator[None]:
    """Run `model`, a pipeline or a module, under a condition; every layer must obey. No guard
    mends what a kernel does.

    Raises `RuntimeError` where a layer ran anything else than what the condition says.
    """
    if condition.group == "exact":
        yield
        return
    if condition.plan is not None:
        emulate = device.type != "cuda"
        with sagepatch.apply(model, plan=condition.plan, emulate=emulate, guard="off") as patch:
            yield
            _obeyed(patch, {entry.site: set(entry.variants) for entry in condition.plan.entries})
        return
    if condition.group == "recipe":
        name = variant_of(condition, device).name
        with sagepatch.apply(model, variant=name, strict=True, guard="off") as patch:
            yield
            _obeyed(patch, {layer.name: {name} for layer in patch.layers})
        return
    variant = baseline(condition.name, toolchain(device))
    with sagepatch.apply(model, variant="exact", guard="off") as patch:
        for layer in patch.layers:
            layer.choose = lambda spec: (variant, None)  # type: ignore[method-assign]
        yield
        _obeyed(patch, {layer.name: {variant.name} for layer in patch.layers})


def _obeyed(patch: sagepatch.Patch, wanted: dict[str, set[str]]) -> None:
    for layer in patch.layers:
        layer.ask_guards()
        ran, should = layer.record.by_variant, wanted[layer.name]
        other = {name: count for name, count in ran.items() if name not in should}
        if other or layer.demoted:
            raise RuntimeError(
                f"layer {layer.name} should run {sorted(should)} and ran {other}: "
                f"{layer.demoted or dict(layer.record.fallbacks)}"
            )


def variant_of(condition: Condition, device: torch.device) -> Variant:
    """The kernel of a recipe or a baseline; a plan has one a layer and none of its own."""
    if condition.group == "recipe":
        return next(v for v in _serving(device) if v.recipe.name == condition.name)
    if condition.group == "baseline":
        return baseline(condition.name, toolchain(device))
    raise ValueError(f"{condition.name} is not one kernel")
