"""Picture scores against their formulas; black and flat pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from sagepatch.errors import MachineError
from sagepatch.report.pictures import Comparison, flat_picture, frame, psnr_db, ssim


def _picture(seed: int, size: tuple[int, int] = (40, 56)) -> np.ndarray:
    noise = np.random.default_rng(seed).uniform(0, 255, (*size, 3))
    return gaussian_filter(noise, (2, 2, 0)).round().astype(np.uint8)


def _reference_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Wang et al. 2004 with scipy's Gaussian cut at 11 pixels, inner region only."""
    values = []
    for channel in range(3):
        x, y = a[..., channel].astype(float), b[..., channel].astype(float)

        def blur(t: np.ndarray) -> np.ndarray:
            return gaussian_filter(t, 1.5, truncate=5 / 1.5)

        mx, my = blur(x), blur(y)
        vx, vy = blur(x * x) - mx * mx, blur(y * y) - my * my
        cxy = blur(x * y) - mx * my
        c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
        full = (2 * mx * my + c1) * (2 * cxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
        values.append(full[5:-5, 5:-5].mean())
    return float(np.mean(values))


@pytest.mark.parametrize("noise", [1, 10, 60])
def test_scores_equal_their_formulas(noise: int) -> None:
    a = _picture(0)
    b = np.clip(a + np.random.default_rng(1).normal(0, noise, a.shape), 0, 255).astype(np.uint8)
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    assert psnr_db(a, b) == pytest.approx(10 * math.log10(255**2 / error))
    assert ssim(a, b) == pytest.approx(_reference_ssim(a, b), abs=1e-6)


def test_equal_pictures() -> None:
    a = _picture(0)
    comparison = Comparison.of([a], [a.copy()])
    assert comparison.psnr_db == math.inf
    assert comparison.ssim == pytest.approx(1.0)
    assert comparison.scores()["psnr_db"] is None
    assert "equal to the last bit" in comparison.sentence()


def test_a_video_scores_by_its_worst_frame() -> None:
    a, b = _picture(0), _picture(1)
    comparison = Comparison.of([a, a], [a, b])
    assert comparison.psnr_db == pytest.approx(psnr_db(a, b))


@pytest.mark.parametrize(
    ("picture", "fault"),
    [
        (np.zeros((8, 8, 3), np.uint8), "the picture is black"),
        (np.full((8, 8, 3), 130, np.uint8), "the picture is of one colour"),
        (_picture(0), None),
    ],
    ids=["black", "flat", "fine"],
)
def test_flat_pictures(picture: np.ndarray, fault: str | None) -> None:
    assert flat_picture(picture) == fault
    faults = Comparison.of([_picture(0, picture.shape[:2])], [picture]).faults()
    assert faults == (() if fault is None else (fault,))


def test_a_black_exact_picture_is_no_fault_of_ours() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    assert Comparison.of([black], [black]).faults() == ()


def test_forms_of_a_picture() -> None:
    a = _picture(0)
    assert np.array_equal(frame(Image.fromarray(a)), a)
    assert np.array_equal(frame(a.astype(np.float32) / 255), a)
    assert frame(a[..., 0]).shape == a.shape
    assert frame(np.full((2, 2, 3), np.nan, np.float32)).max() == 0


def test_side_by_side(tmp_path: Path) -> None:
    a, b = _picture(0), _picture(1)
    comparison = Comparison.of([a], [b])
    comparison.save_side_by_side(tmp_path / "both.png")
    written = np.asarray(Image.open(tmp_path / "both.png"))
    assert np.array_equal(written[:, :56], a)
    assert np.array_equal(written[:, -56:], b)
    with pytest.raises(MachineError, match="cannot write"):
        comparison.save_side_by_side(tmp_path / "no" / "both.png")
