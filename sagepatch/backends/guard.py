"""The guard on a GPU: a quantised call whose output is not finite is recomputed exactly by the
device itself; the host learns of it later, without waiting.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sagepatch.backends import load
from sagepatch.spec import Call
from sagepatch.variant import Variant

# Whose fault a non-finite output was.
Verdict = Literal["kernel", "inputs"]
# The host asks for the flags after calls 1, 2, 4, ... and after every 64th: asking takes a copy and
# an event, which cost as much as a launch.
ASK_EVERY = 64
# Flags that captured graphs read and write, 8 bytes each. They are never freed: a graph may outlive
# the patch, and nobody says when it is gone.
_CAPTURED: list[Tensor] = []


@cache
def available() -> bool:
    """Whether the device can guard itself: the exact kernel behind a flag is a Triton kernel."""
    return importlib.util.find_spec("triton") is not None


def lasting(make: Callable[[], Tensor]) -> Tensor:
    """The tensor that `make` gives, made in another thread, so that it can be kept from call to
    call: it is no inference tensor, whatever mode the caller is in, and not from the caller's
    memory pool. (CUDA graph trees warm up in a pool, and refuse to record while a tensor lives in
    it that is no output.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def owned(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is the default one or of torch's pool, which live as long as the process.
    (torch numbers those 0 and odd; the number of any other is its handle, which is even.)
    """
    return stream.stream_id == 0 or bool(stream.stream_id & 1)


@dataclass(eq=False)
class DeviceGuard:
    """The flags of one layer on one device, and the host's view of them.

    `flags` [2] int32: [0] is 1 once a quantised output was not finite, and from then on every call
    is recomputed exactly; [1] is 1 where the exact output was not finite either.
    """

    device: torch.device
    flags: Tensor = field(init=False)
    calls: int = 0
    _copy: Tensor | None = None
    _event: torch.cuda.Event | None = None
    # Streams that calls ran on, by the driver's handle.
    _streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def zeros() -> Tensor:
            # On the stream that reads them first, and there before another thread's stream does.
            with torch.cuda.stream(stream):
                made = torch.zeros(2, dtype=torch.int32, device=self.device)
            if stream is not None:
                stream.synchronize()
            return made

        self.flags = lasting(zeros)

    def run(self, variant: Variant, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run one kernel on one call, and exact attention over it where it was not finite."""
        if variant.toolchain == "triton":
            from sagepatch.backends.triton import attention as triton_attention

            return triton_attention.run_guarded(call, variant.recipe, self.flags)
        if variant.toolchain == "cuda":
            from sagepatch.backends.cuda import attention as cuda_attention

            return cuda_attention.run_guarded(call, variant.recipe, self.flags)
        from sagepatch.backends.triton.exact import guard

        out, lse = load(variant.entry)(call, variant.recipe)
        guard(self.flags, call, out, lse)
        return out, lse

    def verdict(self) -> Verdict | None:
        """What the device has found so far, as far as the host can tell without waiting."""
        self.calls += 1
        if torch.cuda.is_current_stream_capturing():
            if not any(kept is self.flags for kept in _CAPTURED):
                _CAPTURED.append(self.flags)
            return None
        self._note_stream()
        # Several threads may run one layer: each works on what it has read here, as another may
        # change the attributes meanwhile.
        event, copy = self._event, self._copy
        if event is not None and copy is not None:
            if not event.query():
                return None
            found = copy.tolist()
            self._event = None
            return self._told(found)
        asked = self.calls % ASK_EVERY == 0 or self.calls & (self.calls - 1) == 0
        if not asked:
            return None
        if copy is None:
            copy = self._copy = lasting(
                lambda: torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=True)
            )
        with torch.cuda.device(self.device):
            copy.copy_(self.flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        # Set last: to another thread an event that is not recorded yet looks like one that is over.
        self._event = event
        return None

    def settle(self) -> Verdict | None:
        """What the device has found, after waiting for the calls so far, on whatever streams of
        torch's they ran.

        A stream that is being captured now is not waited for, as that would break the capture: what
        ran on it before is told the next time. So it is with streams that torch was given from
        elsewhere, which may be gone.
        """
        for stream in list(self._streams.values()):
            with torch.cuda.stream(stream):
                waits = not torch.cuda.is_current_stream_capturing()
            if waits:
                stream.synchronize()
        self._event = None
        return self._told(self.flags.tolist())

    def _note_stream(self) -> None:
        """Remember the stream of a call, which the host has to wait for before it reports."""
        if self.device.type != "cuda":
            return
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle not in self._streams:
            stream = torch.cuda.current_stream(self.device)
            if owned(stream):
                self._streams[handle] = stream

    def _told(self, found: list[int]) -> Verdict | None:
        if not found[0]:
            return None
        # Else a layer whose inputs were to blame would run exactly even with better ones.
        self.flags.zero_()
        return "inputs" if found[1] else "kernel"
