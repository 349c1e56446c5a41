"""`sagepatch run demo`: the bundled pipeline, both pictures, no network."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cli.conftest import Sage
from PIL import Image


def test_two_steps_of_the_demo(sage: Sage) -> None:
    ended = sage("run", "demo", "--prompt", "a red aardvarkish apple", "--steps", 2)
    assert ended.code == 0, ended.err
    assert 'never taught "aardvarkish"' in ended.err
    assert "accuracy, not speed" in ended.err.replace("\n", " ")
    assert "PSNR" in ended.out
    assert "0 exact)" in ended.out
    both = np.asarray(Image.open("sagepatch-demo.png"))
    assert both.shape == (128, 128 + 8 + 128, 3)


@pytest.mark.slow
def test_the_whole_demo_takes_less_than_a_minute(sage: Sage) -> None:
    started = time.perf_counter()
    ended = sage("run", "demo", "--prompt", "a red apple", "--report", "demo.html")
    assert ended.code == 0, ended.err
    assert time.perf_counter() - started < 60
    picture = np.asarray(Image.open("sagepatch-demo.png"))
    red, green, blue = (picture[40:100, 176:224, i].mean() for i in range(3))
    assert red > green + 40
    assert red > blue + 40
