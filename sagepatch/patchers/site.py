"""What a patcher finds in a model, and a change that knows how to undo itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from sagepatch.layer import PatchedLayer, SiteKind


@dataclass(frozen=True, slots=True)
class Site:
    """One attention layer that can be patched.

    `name` is the exact module path inside the pipeline or model
    ("transformer.transformer_blocks.0.attn"). `install(layer)` routes this one instance through
    `functional.run(call, handle=layer.handle)` and returns the `Swap` that takes it back.
    """

    name: str
    kind: SiteKind
    module: nn.Module
    patcher: str  # "diffusers", "transformers", "sdpa"
    install: Callable[[PatchedLayer], Swap]


@dataclass(frozen=True, slots=True)
class Left:
    """One attention layer that stays as it is, and why."""

    name: str
    kind: SiteKind
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that holds attention in one model."""

    sites: tuple[Site, ...]
    left: tuple[Left, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """An installed change of one layer.

    `replaced_by()` is None while the change is in force, else a name of what took its place (a
    processor class, an attention implementation). `undo()` puts back what was there before unless
    something newer took its place; calling it twice is harmless.
    """

    undo: Callable[[], None]
    replaced_by: Callable[[], str | None]
