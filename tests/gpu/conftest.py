"""Marks every test of this folder as one for a GPU: collected anywhere, skipped without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(NEEDS)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of one test serves another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
