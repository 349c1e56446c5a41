"""A GPU and its host with clocks that tests turn: what is queued runs in order, after it was queued
and after what was queued before it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sagepatch.calibration import timing

# One cycle of what the GPU waits in.
CYCLE_US = 1 / timing.CYCLES_PER_US


class VirtualGpu:
    """Microseconds since the start: `host` on the host, `free` when the GPU has done all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycle_us: float = CYCLE_US) -> None:
        self.host, self.free = 0.0, 0.0
        self.cycle_us = cycle_us
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(gpu.free, gpu.host)

            def query(self) -> bool:
                return gpu.host >= self.at

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        clock = SimpleNamespace(perf_counter=lambda: self.host / 1e6)
        monkeypatch.setattr(timing, "time", clock)

    def queue(self, host_us: float, device_us: float) -> None:
        """The host queues work on the GPU."""
        self.host += host_us
        self.free = max(self.free, self.host) + device_us

    def sleep(self, cycles: int) -> None:
        self.queue(0.0, cycles * self.cycle_us)

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.free)
