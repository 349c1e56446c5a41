"""A report waits for every stream that guarded calls ran on, and breaks no capture for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sagepatch.backends.guard import DeviceGuard, owned

POOLED, OTHER, DEFAULT, FOREIGN = 11, 13, 0, 0x7F00


class Streams:
    """A GPU with streams by their numbers, each with work behind it that ends when it is waited
    for; the numbers double as handles.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = DEFAULT
        self.capturing: set[int] = set()
        self.waited: list[int] = []
        self.pending: dict[int, Any] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(self.now))
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.now in self.capturing
        )
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: self.now, raising=False
        )

    def stream(self, number: int) -> SimpleNamespace:
        def synchronize() -> None:
            self.waited.append(number)
            self.pending.pop(number, lambda: None)()

        return SimpleNamespace(stream_id=number, synchronize=synchronize)

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before = self.now
        self.now = stream.stream_id if stream is not None else before
        yield
        self.now = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def guard(streams: Streams) -> DeviceGuard:
    one = DeviceGuard(torch.device("cpu"))
    one.device = torch.device("cuda", 0)
    # Past the calls that copy to the host, which takes a GPU.
    one.calls = 2
    return one


def call_on(guard: DeviceGuard, streams: Streams, number: int) -> None:
    """A call whose output is not finite, and which ends when its stream is waited for."""
    with streams.entered(streams.stream(number)):
        streams.pending[number] = lambda: guard.flags.copy_(torch.tensor([1, 0]))
        guard.calls = 2
        assert guard.verdict() is None


# Once wrong: the stream that asked was waited for alone, and the report was clean.
def test_a_verdict_of_another_stream_s_call_is_told(guard: DeviceGuard, streams: Streams) -> None:
    call_on(guard, streams, POOLED)
    assert guard.settle() == "kernel"
    assert streams.waited == [POOLED]
    assert guard.settle() is None


def test_every_stream_is_waited_for_and_each_once(guard: DeviceGuard, streams: Streams) -> None:
    for number in (POOLED, DEFAULT, POOLED, OTHER):
        call_on(guard, streams, number)
    guard.settle()
    assert sorted(streams.waited) == [DEFAULT, POOLED, OTHER]


def test_a_capture_on_one_of_them_is_not_broken(guard: DeviceGuard, streams: Streams) -> None:
    call_on(guard, streams, POOLED)
    streams.capturing.add(POOLED)
    assert guard.settle() is None
    assert streams.waited == []
    streams.capturing.clear()
    assert guard.settle() == "kernel"


def test_calls_of_a_capture_are_none_to_wait_for(guard: DeviceGuard, streams: Streams) -> None:
    streams.capturing.add(POOLED)
    call_on(guard, streams, POOLED)
    streams.capturing.clear()
    guard.settle()
    assert streams.waited == []


def test_streams_from_elsewhere_are_not_touched(guard: DeviceGuard, streams: Streams) -> None:
    call_on(guard, streams, FOREIGN)
    guard.settle()
    assert streams.waited == []
    assert [owned(streams.stream(n)) for n in (DEFAULT, POOLED, FOREIGN)] == [True, True, False]
