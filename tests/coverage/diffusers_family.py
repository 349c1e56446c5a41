"""What a family of diffusers models is to the coverage tests: its class, a tiny config, and inputs
for one forward at any size; no model is built at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """What one forward works on: latent `height` and `width`, latent `frames`, tokens of text.

    Of the `batch` samples the second has `valid` tokens of text only, where a family masks text.
    """

    height: int
    width: int
    frames: int = 1
    text: int = 9
    batch: int = 1
    valid: int = 5


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One family: `tiny` and `full` are changes to the defaults of the class `model`.

    `inputs(config, size)` makes the arguments of one forward; `small` fits `tiny`. `full` is the
    published geometry (None where the class's defaults are not it and the test knows no other), and
    `usual` the size at which the pipelines work unless told otherwise (None where shapes alone do
    not tell what a forward does). `idle` matches layers that `inputs` give nothing to do.
    """

    name: str
    used_by: str
    model: str
    tiny: dict[str, Any]
    inputs: Callable[[Any, Size], Inputs]
    small: Size
    full: dict[str, Any] | None = None
    usual: Size | None = None
    remark: str = ""
    idle: str = ""

    def __str__(self) -> str:
        return self.name

    def built(self, *, full: bool = False) -> nn.Module:
        """The model with random weights (seed 0), in eval mode.

        Gates and projections that start at zero are random too: else a block has no say.
        """
        torch.manual_seed(0)
        options = self.full if full else self.tiny
        assert options is not None
        made: nn.Module = getattr(diffusers, self.model)(**options)
        for parameter in made.parameters():
            if not parameter.is_meta and not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        return made.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers by seed; nothing but a shape where the default device is meta."""
    if torch.get_default_device().type == "meta":
        return torch.empty(*shape)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(size: Size, dtype: torch.dtype = torch.bool) -> Tensor:
    """The padding mask of the text, [batch, text]: every second sample keeps `valid` tokens."""
    mask = torch.ones(size.batch, size.text, dtype=dtype)
    mask[1::2, size.valid :] = 0
    return mask


def steps(size: Size, value: float = 5.0) -> Tensor:
    """One timestep a sample."""
    return torch.full((size.batch,), value)


def grid_ids(size: Size, axes: int = 3) -> Tensor:
    """Position ids of an image's tokens, [height * width, axes]: row and column in axes 1 and 2."""
    ids = torch.zeros(size.height, size.width, axes)
    ids[..., 1] += torch.arange(size.height)[:, None]
    ids[..., 2] += torch.arange(size.width)[None, :]
    return ids.reshape(-1, axes)


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """Everything that one forward without gradients gives, in one row."""
    with torch.no_grad():
        out = model(**inputs)
    return torch.cat([tensor.flatten() for tensor in _tensors(out)])


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        yield from _tensors(list(out.values()))
    elif isinstance(out, list | tuple):
        for part in out:
            yield from _tensors(part)
