"""The flags of a guard outlive it where a CUDA graph was captured over them, and only there; they
lie in no memory of the call that made them.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class Storages(TorchDispatchMode):
    """Where the tensors live that this thread makes, as a memory pool of its would."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.append(out.untyped_storage().data_ptr())
        return out


def test_flags_come_from_no_pool_of_the_calling_thread() -> None:
    # CUDA graph trees warm up in a pool of their own, and refuse what stays in it.
    with Storages() as storages:
        seen = torch.zeros(2)
        one = guard.DeviceGuard(torch.device("cpu"))
    assert storages.made == [seen.untyped_storage().data_ptr()]
    assert one.flags.tolist() == [0, 0]


def test_flags_made_under_inference_mode_serve_outside_it() -> None:
    with torch.inference_mode():
        one = guard.DeviceGuard(torch.device("cpu"))
        copy = guard.lasting(lambda: torch.zeros(2, dtype=torch.int32))
    one.flags.fill_(1)
    copy.copy_(one.flags)
    assert one.settle() == "inputs"
    assert one.flags.tolist() == [0, 0]
    assert copy.tolist() == [1, 1]


def test_what_fails_in_the_making_of_a_lasting_tensor_is_told() -> None:
    def fail() -> Tensor:
        raise MemoryError("as if the GPU were full")

    with pytest.raises(MemoryError, match="as if"):
        guard.lasting(fail)


# Once wrong: another stream could read them before they were zeros, and a layer was demoted for it.
def test_flags_are_zeros_before_another_stream_can_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    zeros = torch.zeros

    def queued(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        done.append(f"zeros on {device}")
        return zeros(size, dtype=dtype)

    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "zeros", queued)
    guard.DeviceGuard(torch.device("cuda", 1))
    assert done == ["zeros on cuda:1", "waited"]
