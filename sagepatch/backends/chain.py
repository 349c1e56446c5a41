"""Kernels launched one behind the other, again and again: their parameters are packed once, and
only what moves is written anew. Knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from sagepatch.backends import driver
from sagepatch.backends.driver import THREAD, enter, launcher
from sagepatch.backends.frame import Frame, FramePlan
from sagepatch.backends.links import Link


class Chain:
    """Launches of one kind of call, in order. Any thread may call it."""

    def __init__(self, links: Sequence[Link], values: str) -> None:
        """`values`: what a call brings, as `frame.FramePlan` spells it. Raises ValueError or
        struct.error where arguments do not fit their signature.
        """
        self.links = tuple(links)
        self._plan = FramePlan(self.links, values)
        # Parameters are copied by the driver before a launch returns: memory of one call serves the
        # next. Popping and appending are atomic.
        self._free: list[Frame] = []

    def frame(self) -> Frame:
        """Memory for the parameters of one call at a time."""
        return Frame(self.links, self._plan)

    def __call__(self, device: int, stream: int, values: tuple[int | float, ...]) -> None:
        """Launch all on a stream, by its handle, of CUDA device number `device`, the current one.

        Raises RuntimeError with the driver's words where it refuses.
        """
        try:
            frame = self._free.pop()
        except IndexError:
            frame = self.frame()
        if not THREAD.entered:
            enter(device)
        if values != frame.values:
            frame.move(values)
        if stream != frame.stream:
            frame.follow(stream)
        launch = launcher()
        for config, function, params in frame.launches:
            status = launch(config, function, params, None)
            if status:
                name = next(k.name for k in self.links if k.function == function)
                raise RuntimeError(f"kernel {name}: {driver.words(status)}")
        self._free.append(frame)
