"""Where the parameters of a chain of launches lie in memory, and how they follow from one call to
the next: a kernel finds each parameter by a pointer of its own, so that what moves lies together
and is written at once. Launches nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from sagepatch.backends.driver import Config
from sagepatch.backends.links import Argument, Link, Moving, MovingMap, filled
from sagepatch.backends.parameters import FLOAT, FORMATS, MAP_ALIGNMENT, POINTER
from sagepatch.bounded import Bounded

# A value of a call in 8 bytes.
_CELLS = {POINTER: "Q", FLOAT: "f4x"}
# Addresses that one region is remembered for: an allocator gives the same few again and again.
MOST_IMAGES = 64


class _Parameter(NamedTuple):
    """One parameter of a kernel, which may be a structure: its format for struct, but for the order
    of bytes, and what fills it.
    """

    form: str
    size: int
    args: tuple[Argument, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The values of a call that it moves with."""
        return tuple(sorted({a.value for a in self.args if isinstance(a, Moving | MovingMap)}))

    @property
    def cell(self) -> int | None:
        """The number of the value that it is, as it comes; None where it is anything else."""
        (first, *others) = self.args
        if others or not isinstance(first, Moving) or first.offset:
            return None
        return first.value


def _parameters(link: Link) -> list[_Parameter]:
    layout = link.layout
    members = list(zip(layout.places, layout.letters, link.args, strict=True))
    found = []
    for offset, size in zip(layout.offsets, layout.sizes, strict=True):
        at, form, args = offset, "", list[Argument]()
        for place, letter, arg in members:
            if offset <= place < offset + size:
                width, code = FORMATS[letter]
                form += f"{place - at}x{code}" if place > at else code
                at = place + width
                args.append(arg)
        if offset + size > at:
            form += f"{offset + size - at}x"
        found.append(_Parameter(form, size, tuple(args)))
    return found


class _Region:
    """Parameters that move with the same values of a call and take more than a copy of one: places
    in scratch memory, tensor maps, structures.
    """

    def __init__(self) -> None:
        self.form, self.size = "<", 0
        self.args: list[Argument] = []

    def add(self, parameter: _Parameter) -> int:
        """Take up a parameter: where in the region it lies."""
        alignment = MAP_ALIGNMENT if parameter.size >= MAP_ALIGNMENT else 8
        at = -(-self.size // alignment) * alignment
        self.form += f"{at - self.size}x{parameter.form}"
        self.args += parameter.args
        self.size = at + parameter.size
        return at

    def pack(self, values: Sequence[int | float]) -> bytes:
        """The region for the values of a call; for none where nothing in it moves."""
        return struct.pack(self.form, *filled(self.args, values))


class _Images:
    """A region at its place, and what it looked like for values that were seen."""

    __slots__ = ("place", "region", "seen")

    def __init__(self, region: _Region, start: int) -> None:
        self.place = slice(start, start + region.size)
        self.region = region
        self.seen: Bounded[Any, bytes] = Bounded(MOST_IMAGES)

    def of(self, key: Any, values: Sequence[int | float]) -> bytes:
        """The bytes for the values of a call; `key`: those that the region moves with."""
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = self.region.pack(values)
        return found


class FramePlan:
    """How the parameters of a chain lie in memory.

    First cells of 8 bytes, the values of a call as they come, however many kernels take them. Then
    regions, one for each set of values that something else moves with, and one that never moves.
    """

    def __init__(self, links: Sequence[Link], values: str) -> None:
        """`values`: what a call brings, one letter each, POINTER or FLOAT, whether or not a kernel
        takes it. Raises ValueError or struct.error where arguments do not fit their signature.
        """
        kernels = [_parameters(link) for link in links]
        for link in links:
            for letter, arg in zip(link.layout.letters, link.args, strict=True):
                if isinstance(arg, Moving) and letter != values[arg.value]:
                    raise ValueError(
                        f"kernel {link.name} takes value {arg.value} of a call, which is "
                        f"{values[arg.value]!r}, as {letter!r}"
                    )
        self.cells = struct.Struct("<" + "".join(_CELLS[letter] for letter in values))
        regions: dict[tuple[int, ...], _Region] = {}
        places = [
            [
                8 * p.cell
                if p.cell is not None
                else regions.setdefault(p.numbers, _Region()).add(p)
                for p in parameters
            ]
            for parameters in kernels
        ]
        size = self.cells.size
        at = dict[tuple[int, ...], int]()
        for key, region in regions.items():
            at[key] = -(-size // MAP_ALIGNMENT) * MAP_ALIGNMENT
            size = at[key] + region.size
        self.size = size
        self.constants = (at[()], regions[()].pack(())) if () in regions else (0, b"")
        images = {key: _Images(region, at[key]) for key, region in regions.items() if key}
        # By the one value that a region moves with, or a function that picks those of several.
        self.by_one = [(key[0], found) for key, found in images.items() if len(key) == 1]
        self.by_several = [
            (number, itemgetter(*key), found)
            for number, (key, found) in enumerate((k, i) for k, i in images.items() if len(k) > 1)
        ]
        # Where each parameter of each kernel lies.
        self.places = [
            [
                place if p.cell is not None else at[p.numbers] + place
                for p, place in zip(*both, strict=True)
            ]
            for both in zip(kernels, places, strict=True)
        ]


class Frame:
    """Memory of the parameters and settings of a chain, for one call at a time.

    `launches`: addresses of configuration and parameters around the driver's handle, in the order
    in which cuLaunchKernelEx takes them.
    """

    def __init__(self, links: Sequence[Link], plan: FramePlan) -> None:
        self.values: tuple[int | float, ...] | None = None
        self.stream: int | None = None
        self.launches: list[tuple[int, int, int]] = []
        self._plan = plan
        self._keys: list[Any] = [None] * len(plan.by_several)
        self._configs: list[Config] = []
        self._pointers: list[Any] = []
        self._memory = ctypes.create_string_buffer(plan.size + MAP_ALIGNMENT)
        first = -ctypes.addressof(self._memory) % MAP_ALIGNMENT
        self._view = memoryview(self._memory).cast("B")[first : first + plan.size]
        start, constants = plan.constants
        self._view[start : start + len(constants)] = constants
        self._cells = slice(0, plan.cells.size)
        address = ctypes.addressof(self._memory) + first
        for link, places in zip(links, plan.places, strict=True):
            config = Config.of(link.blocks, link.threads, link.shared_bytes, link.programmatic)
            pointers = (ctypes.c_void_p * len(places))(*(address + place for place in places))
            self._configs.append(config)
            self._pointers.append(pointers)
            self.launches.append(
                (ctypes.addressof(config), link.function, ctypes.addressof(pointers))
            )

    def move(self, values: tuple[int | float, ...]) -> None:
        """Make the parameters those of another call."""
        plan, view, before, keys = self._plan, self._view, self.values, self._keys
        try:
            view[self._cells] = plan.cells.pack(*values)
            for number, images in plan.by_one:
                key = values[number]
                if before is None or key != before[number]:
                    view[images.place] = images.seen.get(key) or images.of(key, values)
            for number, key_of, images in plan.by_several:
                key = key_of(values)
                if key != keys[number]:
                    view[images.place] = images.of(key, values)
                    keys[number] = key
        except OverflowError:
            # A scale beyond fp32 is infinite, as it is where C converts it.
            fitting = tuple(v if isinstance(v, int) else ctypes.c_float(v).value for v in values)
            if fitting == values:
                raise
            self.move(fitting)
        self.values = values

    def follow(self, stream: int) -> None:
        """Launch on another stream from now on."""
        for config in self._configs:
            config.stream = stream
        self.stream = stream
