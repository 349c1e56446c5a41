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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and check results of a test stay its own."""
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SAGEPATCH_DISABLE", raising=False)
