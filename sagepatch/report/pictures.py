"""Pictures compared: PSNR, SSIM, black and one-coloured ones, and pairs drawn with captions. Knows
no models.
"""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sagepatch.errors import InvalidArgument
from sagepatch.plan import write_bytes

Frame = NDArray[np.uint8]  # [H, W, 3]
_WINDOW, _SIGMA = 11, 1.5  # Wang et al., Image Quality Assessment, 2004
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
# Pictures whose brightest or most different values are within this count as black or flat.
_FLAT = 2
# How much brighter than the difference itself the picture of a difference is.
DIFFERENCE_GAIN = 8
_GAP = 8
_PAPER, _INK = 255, 60
_SMALLEST_SHOWN = 256


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one seed: frames of the exact and of the quantised one, and how far apart they
    are.

    `psnr_db` is infinite for equal pictures; both scores are the worst over frames, `worst` is the
    number of the frame with the lowest SSIM, from 0. One read back from a saved report has scores
    and `count`, and no frames.
    """

    exact: tuple[Frame, ...]
    quantised: tuple[Frame, ...]
    psnr_db: float
    ssim: float
    worst: int = 0
    count: int = 1

    @classmethod
    def of(cls, exact: Sequence[Any], quantised: Sequence[Any]) -> Comparison:
        """Compare two equally long sequences of pictures: PIL images or arrays [H, W, 3].

        >>> Comparison.of([exact_image], [quantised_image]).sentence()
        'quantised against exact picture: PSNR 54.9 dB, SSIM 0.9996'
        """
        if len(exact) != len(quantised) or not exact:
            raise InvalidArgument(
                f"{len(exact)} exact pictures and {len(quantised)} quantised ones: "
                "needs equally many, one at least"
            )
        a, b = tuple(map(frame, exact)), tuple(map(frame, quantised))
        likeness = [ssim(x, y) for x, y in zip(a, b, strict=True)]
        noise = min(psnr_db(x, y) for x, y in zip(a, b, strict=True))
        lowest = min(likeness)
        return cls(a, b, noise, lowest, likeness.index(lowest), len(a))

    @property
    def worst_pair(self) -> tuple[Frame, Frame] | None:
        """The frames that differ most, exact first; None where only the scores are known."""
        return (self.exact[self.worst], self.quantised[self.worst]) if self.exact else None

    def faults(self) -> tuple[str, ...]:
        """What is visibly wrong with quantised pictures whose exact counterparts are sound: black,
        or of one colour.
        """
        pairs = zip(self.exact, self.quantised, strict=True)
        return flat_among([b for a, b in pairs if flat_picture(a) is None], self.count)

    def scores(self) -> dict[str, float | None]:
        """The scores for JSON; an infinite PSNR is null."""
        finite = math.isfinite(self.psnr_db)
        return {
            "psnr_db": self.psnr_db if finite else None,
            "ssim": self.ssim,
            "frames": self.count,
            "worst_frame": self.worst,
        }

    def sentence(self) -> str:
        """One line for a terminal."""
        shown = f"{self.psnr_db:.1f} dB" if math.isfinite(self.psnr_db) else "equal to the last bit"
        where = "" if self.count == 1 else f" (the worst of {self.count})"
        return f"quantised against exact picture: PSNR {shown}, SSIM {self.ssim:.4f}{where}"

    def save_side_by_side(
        self, path: str | os.PathLike[str], captions: tuple[str, str] = ("exact", "quantised")
    ) -> None:
        """Write the frames that differ most, exact left, quantised right, as a PNG file."""
        if self.worst_pair is None:
            raise InvalidArgument("this comparison was read from a file and holds no pictures")
        write_bytes(path, png_bytes(side_by_side(self.worst_pair, captions)))


def frame(picture: Any) -> Frame:
    """A picture as uint8 [H, W, 3]: PIL images, uint8 arrays or tensors, or floats in 0 to 1.

    Values that are not finite become black. Grey pictures are taken, an alpha channel is dropped.
    """
    if isinstance(picture, torch.Tensor):
        picture = picture.detach().cpu()
        picture = (picture.double() if picture.is_floating_point() else picture).numpy()
    array = np.asarray(picture.convert("RGB") if hasattr(picture, "convert") else picture)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, 2)
    if array.ndim != 3 or array.shape[2] not in (3, 4) or not array.size:
        raise InvalidArgument(f"a picture has shape {array.shape}, needs [height, width, 3]")
    if array.dtype != np.uint8:
        array = _bytes_of_floats(array)
    return np.ascontiguousarray(array[:, :, :3])


def psnr_db(a: Frame, b: Frame) -> float:
    """Peak signal-to-noise ratio in dB for a peak of 255; infinite for equal pictures."""
    _check_sizes(a, b)
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ssim(a: Frame, b: Frame) -> float:
    """Mean structural similarity, 11 x 11 Gaussian window of sigma 1.5, where the window lies
    wholly inside, mean over channels.
    """
    _check_sizes(a, b)
    x, y = _planes(a), _planes(b)
    down, across = (_gaussian(min(_WINDOW, size)) for size in a.shape[:2])

    def blur(planes: torch.Tensor) -> torch.Tensor:
        once = torch.nn.functional.conv2d(planes, down[None, None, :, None])
        return torch.nn.functional.conv2d(once, across[None, None, None, :])

    mean_x, mean_y = blur(x), blur(y)
    var_x = blur(x * x) - mean_x**2
    var_y = blur(y * y) - mean_y**2
    both = blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    structure = (2 * both + _C2) / (var_x + var_y + _C2)
    return float((luminance * structure).mean())


def flat_among(pictures: Sequence[Frame], count: int) -> tuple[str, ...]:
    """A sentence for each kind of picture without content among `pictures`, `count` in all."""
    found = Counter(fault for fault in map(flat_picture, pictures) if fault is not None)
    if count == 1:
        return tuple(f"the picture is {fault}" for fault in found)
    return tuple(f"{n} of {count} pictures are {fault}" for fault, n in found.items())


def flat_picture(picture: Frame) -> str | None:
    """ "black" or "of one colour" for a picture without content, None for any other."""
    if int(picture.max()) <= _FLAT:
        return "black"
    spread = picture.max((0, 1)).astype(int) - picture.min((0, 1)).astype(int)
    return "of one colour" if spread.max() <= _FLAT else None


def difference(a: Frame, b: Frame) -> Frame:
    """Where two pictures differ, black where they do not; `DIFFERENCE_GAIN` times as bright."""
    _check_sizes(a, b)
    apart = np.abs(a.astype(np.int16) - b.astype(np.int16)) * DIFFERENCE_GAIN
    return apart.clip(0, 255).astype(np.uint8)


def side_by_side(pictures: Sequence[Frame], captions: Sequence[str]) -> Frame:
    """Pictures of one height in a row, a caption under each; small ones are shown larger, each
    pixel as a square.
    """
    if len({picture.shape[0] for picture in pictures}) != 1 or len(pictures) != len(captions):
        raise InvalidArgument("side by side needs pictures of one height and a caption for each")
    times = max(1, -(-_SMALLEST_SHOWN // min(picture.shape[1] for picture in pictures)))
    cells: list[Frame] = []
    for picture, caption in zip(pictures, captions, strict=True):
        large = picture.repeat(times, 0).repeat(times, 1)
        cells.append(np.concatenate([large, _caption(caption, large.shape[1])], 0))
    gap = np.full((cells[0].shape[0], _GAP, 3), _PAPER, np.uint8)
    joined = [part for cell in cells for part in (gap, cell)][1:]
    return np.concatenate(joined, 1)


def png_bytes(picture: Frame) -> bytes:
    """A picture as the bytes of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def _caption(text: str, width: int) -> Frame:
    """A strip of paper of that width with a centred line of text."""
    from PIL import Image, ImageDraw, ImageFont

    strip = Image.new("RGB", (width, 26), (_PAPER,) * 3)
    font = ImageFont.load_default(size=14)
    ImageDraw.Draw(strip).text((width / 2, 13), text, (_INK,) * 3, font, anchor="mm")
    return np.asarray(strip)


def _bytes_of_floats(array: NDArray[Any]) -> Frame:
    if not np.issubdtype(array.dtype, np.floating):
        raise InvalidArgument(f"a picture of {array.dtype}: needs uint8, or floats in 0 to 1")
    values = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if low < -0.01 or high > 1.01:
        raise InvalidArgument(
            f"a picture of floats from {low:.3g} to {high:.3g}: needs 0 to 1, or uint8"
        )
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


def _check_sizes(a: Frame, b: Frame) -> None:
    if a.shape != b.shape:
        raise InvalidArgument(
            f"pictures of {a.shape[1]} x {a.shape[0]} and {b.shape[1]} x {b.shape[0]} pixels "
            "cannot be compared: make both of one size"
        )


def _planes(picture: Frame) -> torch.Tensor:
    return torch.from_numpy(picture.astype(np.float64)).permute(2, 0, 1).unsqueeze(1)


def _gaussian(size: int) -> torch.Tensor:
    position = torch.arange(size, dtype=torch.float64, device="cpu") - (size - 1) / 2
    weights = torch.exp(-(position**2) / (2 * _SIGMA**2))
    return weights / weights.sum()
