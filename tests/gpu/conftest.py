"""Marks every test of this folder as one for a GPU: collected anywhere, skipped without CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Several processes test side by side: a pool of compilers in each would only outlive the tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(NEEDS)


@pytest.fixture(autouse=True)
def shared_kernels(
    own_cache: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Kernels are compiled and checked once for all tests of a run; plans stay a test's own."""
    run = tmp_path_factory.getbasetemp()
    # pytest-xdist gives each process a folder in that of the run.
    shared = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "sagepatch-kernels"
    own = tmp_path / "cache"
    own.mkdir(mode=0o700)
    for part in ("kernels", "checks"):
        (shared / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        (own / part).symlink_to(shared / part, target_is_directory=True)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No graph of one test serves another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
