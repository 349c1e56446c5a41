"""Picture scores against their formulas; black and flat pictures; pairs with captions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from sagepatch.errors import InvalidArgument, MachineError
from sagepatch.report.pictures import (
    DIFFERENCE_GAIN,
    Comparison,
    difference,
    flat_picture,
    frame,
    psnr_db,
    side_by_side,
    ssim,
)


def _picture(seed: int, size: tuple[int, int] = (40, 56)) -> np.ndarray:
    noise = np.random.default_rng(seed).uniform(0, 255, (*size, 3))
    return gaussian_filter(noise, (2, 2, 0)).round().astype(np.uint8)


def _noisy(picture: np.ndarray, noise: float) -> np.ndarray:
    added = picture + np.random.default_rng(1).normal(0, noise, picture.shape)
    return np.clip(added, 0, 255).astype(np.uint8)


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


@pytest.mark.parametrize("size", [(40, 56), (11, 13), (33, 12)], ids=str)
@pytest.mark.parametrize("noise", [1, 10, 60])
def test_scores_equal_their_formulas(noise: int, size: tuple[int, int]) -> None:
    a = _picture(0, size)
    b = _noisy(a, noise)
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    assert psnr_db(a, b) == pytest.approx(10 * math.log10(255**2 / error))
    assert ssim(a, b) == pytest.approx(_reference_ssim(a, b), abs=1e-6)


def test_opposite_extremes() -> None:
    black, white = np.zeros((16, 16, 3), np.uint8), np.full((16, 16, 3), 255, np.uint8)
    assert psnr_db(black, white) == 0.0
    c1 = (0.01 * 255) ** 2
    assert ssim(black, white) == pytest.approx(c1 / (255**2 + c1))


def test_a_picture_smaller_than_the_window() -> None:
    a = _picture(0, (3, 5))
    assert ssim(a, a) == pytest.approx(1.0)
    assert ssim(a, 255 - a) < 0.9


def test_equal_pictures() -> None:
    a = _picture(0)
    comparison = Comparison.of([a], [a.copy()])
    assert comparison.psnr_db == math.inf
    assert comparison.ssim == pytest.approx(1.0)
    assert comparison.scores()["psnr_db"] is None
    assert "equal to the last bit" in comparison.sentence()


def test_a_video_scores_by_its_worst_frame() -> None:
    a, b = _picture(0), _noisy(_picture(0), 40)
    comparison = Comparison.of([a, a, a], [a, _noisy(a, 5), b])
    assert comparison.psnr_db == pytest.approx(psnr_db(a, b))
    assert comparison.ssim == pytest.approx(ssim(a, b))
    assert (comparison.worst, comparison.count) == (2, 3)
    assert comparison.worst_pair is not None
    assert np.array_equal(comparison.worst_pair[1], b)
    assert "the worst of 3" in comparison.sentence()


ORANGE = np.broadcast_to(np.array([250, 140, 20], np.uint8), (8, 8, 3))


@pytest.mark.parametrize(
    ("picture", "fault"),
    [
        (np.zeros((8, 8, 3), np.uint8), "black"),
        (np.full((8, 8, 3), 2, np.uint8), "black"),
        (np.full((8, 8, 3), 130, np.uint8), "of one colour"),
        (ORANGE, "of one colour"),
        (_picture(0, (8, 8)), None),
    ],
    ids=["black", "almost-black", "grey", "orange", "fine"],
)
def test_flat_pictures(picture: np.ndarray, fault: str | None) -> None:
    assert flat_picture(picture) == fault
    faults = Comparison.of([_picture(3, (8, 8))], [picture]).faults()
    assert faults == (() if fault is None else (f"the picture is {fault}",))


def test_faults_of_a_video_are_counted_where_the_exact_frame_is_sound() -> None:
    good, black = _picture(0, (8, 8)), np.zeros((8, 8, 3), np.uint8)
    # It fades in from black by itself; frames 2 and 3 should show something.
    faults = Comparison.of([black, good, good, good], [black, good, black, black]).faults()
    assert faults == ("2 of 4 pictures are black",)


def test_a_black_exact_picture_is_no_fault_of_ours() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    assert Comparison.of([black], [black]).faults() == ()


def test_forms_of_a_picture() -> None:
    a = _picture(0)
    alpha = np.concatenate([a, np.full((*a.shape[:2], 1), 9, np.uint8)], 2)
    assert np.array_equal(frame(Image.fromarray(a)), a)
    assert np.array_equal(frame(a.astype(np.float32) / 255), a)
    assert np.array_equal(frame(torch.from_numpy(a)), a)
    assert np.array_equal(frame(torch.from_numpy(a).double() / 255), a)
    assert np.array_equal(frame(alpha), a)
    assert np.array_equal(frame(a[..., 0])[..., 1], a[..., 0])
    assert frame(torch.full((2, 2, 3), 1.0, dtype=torch.bfloat16)).min() == 255


def test_values_that_are_not_finite_are_black() -> None:
    broken = np.full((2, 2, 3), np.nan, np.float32)
    broken[0, 0] = np.inf
    assert frame(broken).max() == 0


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (np.zeros((3, 8, 8), np.uint8), r"shape \(3, 8, 8\)"),
        (np.zeros((0, 8, 3), np.uint8), "shape"),
        (np.zeros((8, 8, 3), np.int64), "int64: needs uint8"),
        (np.full((8, 8, 3), 200.0), "from 200 to 200: needs 0 to 1"),
        (np.full((8, 8, 3), -1.0), "needs 0 to 1"),
    ],
    ids=["channels-first", "empty", "integers", "bytes-as-floats", "minus-one-to-one"],
)
def test_pictures_that_are_refused(picture: np.ndarray, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        frame(picture)


@pytest.mark.parametrize(
    ("exact", "quantised", "said"),
    [
        ([_picture(0)], [], "1 exact pictures and 0 quantised"),
        ([], [], "one at least"),
        ([_picture(0)], [_picture(0, (40, 40))], "56 x 40 and 40 x 40"),
    ],
    ids=["counts", "none", "sizes"],
)
def test_pairs_that_are_refused(exact: list, quantised: list, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Comparison.of(exact, quantised)


def test_difference() -> None:
    a = np.full((2, 2, 3), 100, np.uint8)
    b = a.copy()
    b[0, 0], b[1, 1] = 97, 255
    shown = difference(a, b)
    assert shown[0, 0].tolist() == [3 * DIFFERENCE_GAIN] * 3
    assert shown[1, 1].tolist() == [255] * 3
    assert shown[0, 1].tolist() == [0] * 3


def test_side_by_side(tmp_path: Path) -> None:
    a, b = _picture(0, (40, 56)), _picture(1, (40, 56))
    Comparison.of([a], [b]).save_side_by_side(tmp_path / "both.png")
    written = np.asarray(Image.open(tmp_path / "both.png"))
    # Small pictures are shown five times as large: 280 pixels wide.
    assert np.array_equal(written[:200:5, :280:5], a)
    assert np.array_equal(written[:200:5, -280::5], b)
    for caption in (written[200:, :280], written[200:, -280:]):
        assert 15 < caption.shape[0] < 40
        assert (caption < 128).any()
    with pytest.raises(MachineError, match="cannot write"):
        Comparison.of([a], [b]).save_side_by_side(tmp_path / "no" / "both.png")


def test_large_pictures_stay_as_they_are() -> None:
    a = _picture(0, (20, 300))
    assert np.array_equal(side_by_side([a, a, a], ["1", "2", "3"])[:20, :300], a)
    with pytest.raises(InvalidArgument, match="one height"):
        side_by_side([a, _picture(0, (21, 300))], ["1", "2"])
