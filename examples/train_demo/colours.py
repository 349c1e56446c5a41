"""Holds the colour words and the repainting of pictures in another hue; knows no captions."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paint:
    """A colour to repaint with: hue in degrees, and factors on saturation and value."""

    hue: float
    saturation: float
    value: float


PAINTS = {
    "red": Paint(3.0, 1.10, 0.95),
    "orange": Paint(28.0, 1.10, 1.00),
    "yellow": Paint(47.0, 1.10, 1.15),
    "green": Paint(122.0, 0.85, 0.80),
    "blue": Paint(212.0, 1.00, 0.97),
    "purple": Paint(280.0, 0.85, 0.88),
    "pink": Paint(332.0, 0.62, 1.10),
}
SOURCE_COLOURS = (*PAINTS, "brown", "grey")
COLOUR_WORDS = (*SOURCE_COLOURS, "black", "white")

# Hues within NEAR of the dominant one are repainted, those beyond FAR stay (an apple's leaf).
NEAR_DEGREES, FAR_DEGREES = 38.0, 58.0
# How much of the spread of hues round the dominant one survives the repainting.
HUE_SPREAD = 0.5
GREY_SATURATION = 0.58
BROWN_BRIGHTENING = 1.35


def _ramp(x: Tensor, low: float, high: float) -> Tensor:
    """0 below low, 1 above high, smooth between; low > high turns it round."""
    t = ((x - low) / (high - low)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def to_hsv(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in degrees, saturation and value of [..., 3, H, W] in 0..1; each [..., H, W]."""
    value, which = rgb.max(-3)
    chroma = value - rgb.min(-3).values
    red, green, blue = rgb.unbind(-3)
    safe = chroma.clamp_min(1e-6)
    sixths = torch.where(
        which == 0,
        (green - blue) / safe % 6,
        torch.where(which == 1, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    return sixths * 60, chroma / value.clamp_min(1e-6), value


def to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """The inverse of `to_hsv`: [..., 3, H, W] in 0..1."""
    channels = []
    for n in (5, 3, 1):
        k = (n + hue / 60) % 6
        channels.append(value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, -3)


def dominant_hue(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """The peak of the smoothed hue histogram weighted by saturation x value: [N] from [N, H, W]."""
    bins = 72
    index = (hue / 360 * bins).long().clamp(0, bins - 1).flatten(1)
    weight = (saturation * value * (saturation > 0.2)).flatten(1)
    counts = torch.zeros(len(hue), bins, device=hue.device).scatter_add_(1, index, weight)
    smooth = sum(counts.roll(shift, 1) for shift in range(-2, 3))
    assert isinstance(smooth, Tensor)
    return (smooth.argmax(1).float() + 0.5) * 360 / bins


def repaint(images: Tensor, sources: list[str], targets: list[str]) -> Tensor:
    """Repaint each picture's dominant colour.

    images [N, 3, H, W] in 0..1 on white; sources name the dominant colours (of SOURCE_COLOURS),
    targets the new ones (of PAINTS). Only saturated pixels near the dominant hue change; of a grey
    picture the unsaturated ones that are neither white nor black.
    """
    hue, saturation, value = to_hsv(images)
    device = images.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)[:, None, None]

    paints = [PAINTS[name] for name in targets]
    new_hue = column([paint.hue for paint in paints])
    more_saturation = column([paint.saturation for paint in paints])
    more_value = column(
        [
            paint.value * (BROWN_BRIGHTENING if source == "brown" else 1.0)
            for paint, source in zip(paints, sources, strict=True)
        ]
    )
    grey = column([float(source == "grey") for source in sources])

    centre = dominant_hue(hue, saturation, value)[:, None, None]
    offset = (hue - centre + 180) % 360 - 180
    near = _ramp(offset.abs(), FAR_DEGREES, NEAR_DEGREES) * _ramp(saturation, 0.10, 0.25)
    plain = _ramp(saturation, 0.45, 0.30) * _ramp(value, 0.99, 0.93) * _ramp(value, 0.15, 0.35)
    weight = torch.where(grey > 0, plain, near)[:, None]

    painted = to_rgb(
        (new_hue + torch.where(grey > 0, 0.0, HUE_SPREAD * offset.clamp(-60, 60))) % 360,
        (torch.where(grey > 0, GREY_SATURATION, saturation) * more_saturation).clamp(0, 1),
        (value * more_value).clamp(0, 1),
    )
    return (weight * painted + (1 - weight) * images).clamp(0, 1)
