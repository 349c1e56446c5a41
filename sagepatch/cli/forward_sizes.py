"""The size of what a denoiser makes, in pixels and in latents, and the tensors that many denoisers
take at it. Knows no class of denoiser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """What is drawn or filmed: pixels, frames, and tokens of text. One sample: classifier-free
    guidance doubles everything alike.
    """

    height: int
    width: int
    frames: int
    text: int

    def __str__(self) -> str:
        film = f" x {self.frames} frames" if self.frames > 1 else ""
        return f"{self.width} x {self.height}{film}, {self.text} tokens of text"


@dataclass(frozen=True, slots=True)
class Forward:
    """How to run a class of denoiser. `inputs(config, latent)` takes a `Size` in latents; a latent
    stands for `scale` x `scale` pixels and `frame_scale` frames but the first, which has its own.
    `text` is the usual number of tokens of text, `pixels` the usual height, width and frames:
    numbers, or a function of the config that gives None where that does not say.
    """

    inputs: Callable[[Any, Size], Inputs]
    scale: int
    text: int
    pixels: tuple[int, int, int] | Callable[[Any], tuple[int, int, int] | None]
    frame_scale: int = 1

    def size(self, config: Any) -> Size | None:
        """The usual size, None where the config does not say."""
        pixels = self.pixels(config) if callable(self.pixels) else self.pixels
        return None if pixels is None else Size(*pixels, self.text)

    def latent(self, size: Size, vae_scale: int | None = None) -> Size:
        """The size in latents; `vae_scale` where the autoencoder does not shrink 8 times."""
        scale = self.scale if vae_scale is None else self.scale * vae_scale // 8
        return replace(
            size,
            height=max(1, size.height // scale),
            width=max(1, size.width // scale),
            frames=(size.frames - 1) // self.frame_scale + 1,
        )


def timestep() -> Tensor:
    """The middle of 1000 steps, [1]."""
    return torch.full((1,), 500.0)


def guidance(c: Any) -> Tensor | None:
    """Guidance as a distilled model takes it, [1]; None for one that takes none."""
    return timestep() if c.guidance_embeds else None


def picture(c: Any, size: Size) -> Tensor:
    """A picture's latents, [1, C, H, W]."""
    return torch.empty(1, c.in_channels, size.height, size.width)


def film(c: Any, size: Size) -> Tensor:
    """A film's latents, [1, C, F, H, W]."""
    return torch.empty(1, c.in_channels, size.frames, size.height, size.width)


def text_states(size: Size, width: int) -> Tensor:
    """States of a text encoder, [1, tokens, `width`]."""
    return torch.empty(1, size.text, width)


def kept(size: Size) -> Tensor:
    """The mask of a text without padding, [1, tokens]."""
    return torch.ones(1, size.text, dtype=torch.bool)
