"""Kernels launched one behind the other, again and again: their parameters are packed once, and
only what moves is written anew. Knows no arithmetic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sagepatch.backends import driver
from sagepatch.backends.driver import Config, enter, launcher
from sagepatch.backends.parameters import FLOAT, MAP, MAP_ALIGNMENT, POINTER, Layout


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


class Chain:
    """Launches of one kind of call, in order. Any thread may call it."""

    def __init__(self, links: Sequence[Link], values: int) -> None:
        """`values`: how many a call brings. Raises struct.error where arguments do not fit their
        signature.
        """
        self.links = tuple(links)
        self.values = values
        # Parameters are copied by the driver before a launch returns: memory of one call serves the
        # next. Popping and appending are atomic.
        self._free: list[_Frame] = []

    def __call__(self, device: int, values: tuple[int | float, ...]) -> None:
        """Launch all on the current stream of CUDA device number `device`, the current one.

        Raises RuntimeError with the driver's words where it refuses.
        """
        try:
            frame = self._free.pop()
        except IndexError:
            frame = _Frame(self.links, self.values)
        enter(device)
        if values != frame.values:
            frame.move(values)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if stream != frame.stream:
            frame.follow(stream)
        launch = launcher()
        for config, function, params in frame.launches:
            status = launch(config, function, params, None)
            if status:
                name = next(k.name for k in self.links if k.function == function)
                raise RuntimeError(f"kernel {name}: {driver.words(status)}")
        self._free.append(frame)


class _Moves(NamedTuple):
    """Where one value of a call goes: numbers among the words with offsets, numbers among the
    floats, places of tensor maps in bytes.
    """

    value: int
    words: list[tuple[int, int]]
    floats: list[int]
    maps: list[tuple[int, MovingMap]]


class _Frame:
    """Memory of the parameters and settings of a chain, for one call at a time."""

    def __init__(self, links: Sequence[Link], values: int) -> None:
        self.values: tuple[int | float | None, ...] = (None,) * values
        self.stream: int | None = None
        self.launches: list[tuple[int, int, int]] = []
        self._configs: list[Config] = []
        self._pointers: list[Any] = []
        layouts = [link.layout for link in links]
        starts, size = [], 0
        for layout in layouts:
            starts.append(size)
            size += -(-layout.packer.size // MAP_ALIGNMENT) * MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        first = -ctypes.addressof(self._memory) % MAP_ALIGNMENT
        self._address = ctypes.addressof(self._memory) + first
        self._words: Any = (ctypes.c_uint64 * (size // 8)).from_address(self._address)
        self._floats: Any = (ctypes.c_float * (size // 4)).from_address(self._address)
        # What moves with each value.
        moves = [_Moves(number, [], [], []) for number in range(values)]
        for link, layout, start in zip(links, layouts, starts, strict=True):
            letters = layout.letters
            plain = [
                arg
                if not isinstance(arg, Moving | MovingMap)
                else bytes(128)
                if letter == MAP
                else 0
                for arg, letter in zip(link.args, letters, strict=True)
            ]
            layout.packer.pack_into(self._memory, first + start, *plain)
            for arg, letter, place in zip(link.args, letters, layout.places, strict=True):
                at = start + place
                if isinstance(arg, MovingMap):
                    moves[arg.value].maps.append((at, arg))
                elif isinstance(arg, Moving) and letter == POINTER:
                    moves[arg.value].words.append((at // 8, arg.offset))
                elif isinstance(arg, Moving):
                    assert letter == FLOAT, f"{link.name}: a moving {letter}"
                    moves[arg.value].floats.append(at // 4)
            config = Config.of(link.blocks, link.threads, link.shared_bytes, link.programmatic)
            pointers = (ctypes.c_void_p * len(layout.offsets))(
                *(self._address + start + offset for offset in layout.offsets)
            )
            self._configs.append(config)
            self._pointers.append(pointers)
            self.launches.append(
                (ctypes.addressof(config), link.function, ctypes.addressof(pointers))
            )
        self._moves = [move for move in moves if move.words or move.floats or move.maps]

    def move(self, values: tuple[int | float, ...]) -> None:
        """Write what differs from the call before."""
        before, words, floats = self.values, self._words, self._floats
        for number, word_places, float_places, map_places in self._moves:
            new = values[number]
            if new == before[number]:
                continue
            for place, offset in word_places:
                words[place] = new + offset
            for place in float_places:
                floats[place] = new
            for at, moving in map_places:
                encoded = moving.encode(int(new) + moving.offset)
                ctypes.memmove(self._address + at, encoded, len(encoded))
        self.values = values

    def follow(self, stream: int) -> None:
        """Launch on another stream from now on."""
        for config in self._configs:
            config.stream = stream
        self.stream = stream
