"""Moments of a device, and one forward of a patched model watched call by call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sagepatch.layer import PatchedLayer
from sagepatch.ops import run_layer
from sagepatch.patch import Patch
from sagepatch.spec import AttnSpec, Call
from sagepatch.variant import Variant


class Instant:
    """A moment of the device: on a GPU an event, recorded without waiting for it."""

    def __init__(self, device: str) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.at = time.perf_counter()

    def ms_since(self, earlier: Instant) -> float:
        """Milliseconds between two moments; waits for this one."""
        if self.event is None or earlier.event is None:
            return 1e3 * (self.at - earlier.at)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event))


def settled(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Watch:
    """Observes one forward: times every layer's call in place, and keeps one call of each kind, on
    which kernels are timed alone afterwards.
    """

    device: str
    kinds: dict[AttnSpec, Call] = field(default_factory=dict)
    counts: Counter[tuple[AttnSpec, Variant]] = field(default_factory=Counter)
    spans: list[tuple[Instant, Instant]] = field(default_factory=list)

    def observe(self, layer: PatchedLayer, call: Call) -> tuple[Tensor, Tensor | None]:
        spec = call.spec()
        self.kinds.setdefault(spec, call)
        self.counts[spec, layer.choose(spec)[0]] += 1
        layer.observer = None
        try:
            start = Instant(self.device)
            found = run_layer(layer, call)
            self.spans.append((start, Instant(self.device)))
        finally:
            layer.observer = self.observe
        return found

    def over(self, patch: Patch, run: Callable[[], Tensor]) -> Tensor:
        """The output of `run`, a forward of the patched model."""
        for layer in patch.layers:
            layer.observer = self.observe
        try:
            return run()
        finally:
            for layer in patch.layers:
                layer.observer = None

    @property
    def in_place_ms(self) -> float:
        """All attention calls of the forward, as they ran in it."""
        return sum(end.ms_since(start) for start, end in self.spans)
