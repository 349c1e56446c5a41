"""Puts tests/ on the path, so that tests share tests/models; no network, a cache of its own, and
one thread: the models here are so small that threads cost more than they compute.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

# Names a folder of compiled kernels that all tests share: on a GPU compiling takes longest.
KERNELS = "SAGEPATCH_TEST_KERNELS"
# Files of tests of compiling and keeping themselves, which look for what they compiled.
COMPILING = ("test_cuda_cache.py", "*_build.py", "test_build_command.py")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and check results of a test stay its own."""
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SAGEPATCH_DISABLE", raising=False)


@pytest.fixture(autouse=True)
def kernels_of_all_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels are compiled once for all tests and processes that name the same folder."""
    named = os.environ.get(KERNELS)
    if not named or any(request.path.match(pattern) for pattern in COMPILING):
        return
    from sagepatch.backends.cuda import cache

    shared = Path(named).resolve()
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    monkeypatch.setattr(cache, "_folder", lambda: shared)
