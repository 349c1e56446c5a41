"""The flags of a guard outlive it where a CUDA graph was captured over them, and only there."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sagepatch.backends import guard


@pytest.mark.parametrize("captured", [True, False])
def test_flags_of_a_captured_graph_stay(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(guard, "_CAPTURED", [])
    one = guard.DeviceGuard(torch.device("cpu"))
    # Past the calls that copy to the host, which takes a GPU.
    one.calls = 2
    flags = weakref.ref(one.flags)
    assert one.verdict() is None
    one.calls = 4
    assert one.verdict() is None
    del one
    gc.collect()
    assert (flags() is not None) == captured
    assert len(guard._CAPTURED) == captured
