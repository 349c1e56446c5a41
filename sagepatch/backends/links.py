"""One launch of a chain: which kernel, how many blocks, and which of its parameters move from call
to call. Launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sagepatch.backends.parameters import Layout


@dataclass(frozen=True, slots=True)
class Moving:
    """A parameter that differs from call to call: value number `value` of the call, and for an
    address `offset` bytes behind it.
    """

    value: int
    offset: int = 0

    def of(self, values: Sequence[int | float]) -> int | float:
        """For the values of a call."""
        return values[self.value] + self.offset


@dataclass(frozen=True, slots=True)
class MovingMap:
    """As `Moving`, a tensor map: `encode` makes its 128 bytes from an address."""

    value: int
    offset: int
    encode: Callable[[int], bytes]

    def of(self, values: Sequence[int | float]) -> bytes:
        """For the values of a call."""
        return self.encode(int(values[self.value]) + self.offset)


Argument = int | float | bytes | Moving | MovingMap


def filled(args: Sequence[Argument], values: Sequence[int | float]) -> list[int | float | bytes]:
    """The arguments of one launch, for the values of a call."""
    return [arg.of(values) if isinstance(arg, Moving | MovingMap) else arg for arg in args]


@dataclass(frozen=True, slots=True)
class Link:
    """One launch: `function` is the driver's handle; `owner` keeps the machine code loaded."""

    name: str
    function: int
    blocks: int
    threads: int
    shared_bytes: int
    layout: Layout
    args: tuple[Argument, ...]
    programmatic: bool = False
    owner: Any = None
