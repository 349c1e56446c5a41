"""One forward of each part of a model, run on shapes alone at the size the user means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sagepatch.cli.forward_cost import Cost, Shape, cost
from sagepatch.cli.forward_inputs import FORWARDS, Size
from sagepatch.patchers.site import Site

# Tokens of a prompt where nobody says.
PROMPT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """The size of a generation, None where the usual one is meant. `text` is the tokens of text
    that a denoiser sees, `tokens` the prompt of a language model, `vae_scale` how many pixels wide
    a latent of the pipeline's autoencoder is.
    """

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    text: int | None = None
    tokens: int | None = None
    vae_scale: int | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """One part of a model: what one forward costs and at which size, or why that is not known."""

    part: str
    size: str
    cost: Cost | None
    why_not: str = ""

    @property
    def shapes(self) -> Mapping[str, tuple[Shape, ...]]:
        """The attention calls of each layer; empty where they are not known."""
        return {} if self.cost is None else self.cost.calls


def count(parts: Mapping[str, nn.Module], sites: Sequence[Site], asked: Asked) -> list[Counted]:
    """Count one forward of each part; the modules are on the meta device."""
    found = []
    for name, module in parts.items():
        inside = {id(one) for one in module.modules()}
        own = [site for site in sites if id(site.module) in inside]
        found.append(_count(name, module, own, asked))
    return found


def _count(part: str, module: nn.Module, sites: Sequence[Site], asked: Asked) -> Counted:
    kind = type(module).__name__
    if kind in FORWARDS:
        inputs = _denoiser(module, asked)
        if inputs is None:
            return Counted(part, "", None, "its config names no size: pass --width and --height")
        size, given = inputs
    elif kind.endswith("ForCausalLM"):
        tokens = asked.tokens or PROMPT_TOKENS
        with torch.device("meta"):
            given = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        size = f"a prompt of {tokens} tokens"
    else:
        return Counted(part, "", None, f"what a forward of {kind} takes is not known here")
    try:
        made = cost(module.eval(), sites, lambda: module(**given))
    except (RuntimeError, NotImplementedError) as error:  # torch's word for "needs numbers"
        first = str(error).partition("\n")[0]
        return Counted(part, size, None, f"a forward of {kind} needs more than shapes: {first}")
    if not made.attention:
        return Counted(part, size, None, f"{kind} computes its attention without torch's SDPA")
    return Counted(part, size, made)


def _denoiser(module: nn.Module, asked: Asked) -> tuple[str, dict[str, Any]] | None:
    forward = FORWARDS[type(module).__name__]
    config: Any = module.config
    usual = forward.size(config)
    if usual is None:
        if asked.height is None or asked.width is None:
            return None
        usual = Size(asked.height, asked.width, 1, forward.text)
    size = replace(
        usual,
        height=asked.height or usual.height,
        width=asked.width or usual.width,
        frames=asked.frames or usual.frames,
        text=asked.text or usual.text,
    )
    with torch.device("meta"):
        return str(size), forward.inputs(config, forward.latent(size, asked.vae_scale))
