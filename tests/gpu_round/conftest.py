"""Puts the repository's root on the path: benchmarks are no part of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., object]:
    """Makes a round in a folder of its own, to be run."""
    from rounds import made

    return partial(made, tmp_path)
