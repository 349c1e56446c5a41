"""Pictures compared: PSNR, SSIM, black and constant frames, and two of them side by side. Knows no
models.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagepatch.plan import write_bytes

Frame = NDArray[np.uint8]  # [H, W, 3]
_WINDOW, _SIGMA = 11, 1.5  # Wang et al., Image Quality Assessment, 2004
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one seed: frames of the exact and of the quantised one, and how far apart they
    are.

    `psnr_db` is infinite for equal pictures; both scores are the worst over frames.
    """

    exact: tuple[Frame, ...]
    quantised: tuple[Frame, ...]
    psnr_db: float
    ssim: float

    @classmethod
    def of(cls, exact: Sequence[Any], quantised: Sequence[Any]) -> Comparison:
        """Compare two equally long sequences of pictures (PIL images or arrays [H, W, 3])."""
        pairs = [(frame(a), frame(b)) for a, b in zip(exact, quantised, strict=True)]
        return cls(
            tuple(a for a, _ in pairs),
            tuple(b for _, b in pairs),
            min(psnr_db(a, b) for a, b in pairs),
            min(ssim(a, b) for a, b in pairs),
        )

    def faults(self) -> tuple[str, ...]:
        """What is visibly wrong with the quantised pictures alone: black or of one colour."""
        flat = [fault for fault in map(flat_picture, self.quantised) if fault is not None]
        good = all(flat_picture(picture) is None for picture in self.exact)
        return tuple(dict.fromkeys(flat)) if good else ()

    def scores(self) -> dict[str, float | None]:
        """The scores for JSON; an infinite PSNR is null."""
        finite = math.isfinite(self.psnr_db)
        return {"psnr_db": self.psnr_db if finite else None, "ssim": self.ssim}

    def sentence(self) -> str:
        """One line for a terminal."""
        shown = f"{self.psnr_db:.1f} dB" if math.isfinite(self.psnr_db) else "equal to the last bit"
        return f"quantised against exact picture: PSNR {shown}, SSIM {self.ssim:.4f}"

    def save_side_by_side(self, path: str | os.PathLike[str]) -> None:
        """Write the first frames, exact left, quantised right, as a PNG file."""
        gap = np.full((self.exact[0].shape[0], 8, 3), 255, np.uint8)
        joined = np.concatenate([self.exact[0], gap, self.quantised[0]], 1)
        write_bytes(path, png_bytes(joined))


def frame(picture: Any) -> Frame:
    """A picture as uint8 [H, W, 3]: PIL images, uint8 arrays, or floats in 0 to 1."""
    array = np.asarray(picture.convert("RGB") if hasattr(picture, "convert") else picture)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, 2)
    if array.dtype != np.uint8:
        array = np.nan_to_num(array.astype(np.float64)).clip(0, 1) * 255
        array = array.round().astype(np.uint8)
    return array[:, :, :3]


def psnr_db(a: Frame, b: Frame) -> float:
    """Peak signal-to-noise ratio in dB for a peak of 255; infinite for equal pictures."""
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ssim(a: Frame, b: Frame) -> float:
    """Mean structural similarity, 11 x 11 Gaussian window of sigma 1.5, mean over channels."""
    x, y = _planes(a), _planes(b)
    window = _gaussian(min(_WINDOW, *a.shape[:2]))

    def blur(t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(t, window)

    mean_x, mean_y = blur(x), blur(y)
    var_x = blur(x * x) - mean_x**2
    var_y = blur(y * y) - mean_y**2
    both = blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    structure = (2 * both + _C2) / (var_x + var_y + _C2)
    return float((luminance * structure).mean())


def flat_picture(picture: Frame) -> str | None:
    """ "black" or "of one colour" for a picture without content, None for any other."""
    if int(picture.max()) <= 2:
        return "the picture is black"
    if int(picture.max()) - int(picture.min()) <= 2:
        return "the picture is of one colour"
    return None


def png_bytes(picture: Frame) -> bytes:
    """A picture as the bytes of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def _planes(picture: Frame) -> torch.Tensor:
    return torch.from_numpy(picture.astype(np.float64)).permute(2, 0, 1).unsqueeze(1)


def _gaussian(size: int) -> torch.Tensor:
    position = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    weights = torch.exp(-(position**2) / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    return torch.outer(weights, weights)[None, None]
