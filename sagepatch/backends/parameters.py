"""How the parameters of a kernel lie in memory, from one letter a parameter. Launches nothing."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# A parameter in a signature: its size, and its format for struct.
POINTER, INT, LONG, FLOAT, MAP, FLAG = "P", "i", "q", "f", "T", "b"
FORMATS = {
    POINTER: (8, "Q"),
    INT: (4, "i"),
    LONG: (8, "q"),
    FLOAT: (4, "f"),
    MAP: (128, "128s"),
    FLAG: (1, "b"),
}
# What the driver asks of a tensor map in memory, and C of a structure that holds 8-byte members.
MAP_ALIGNMENT = 64
_STRUCTURE_ALIGNMENT = 8
_NO_BRACES = str.maketrans("", "", "{}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each parameter lies in the block of memory that a launch reads: `offsets` and `sizes`
    of parameters; `letters` and `places` of all values, members of structures too.
    """

    packer: struct.Struct
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    letters: str

    @classmethod
    def of(cls, signature: str) -> Layout:
        """From one letter a parameter: P pointer, i int32, q int64, f float, b int8, T tensor map;
        letters in braces are the members of one parameter that is a structure, of 8-byte
        alignment.

        >>> Layout.of("Pi{if}T").offsets, Layout.of("Pi{if}T").places
        ((0, 8, 16, 64), (0, 8, 16, 20, 64))
        """
        at, form, offsets, sizes, places = 0, "<", [], [], []
        inside = False
        for letter in signature:
            if letter in "{}":
                inside = letter == "{"
                gap = -at % _STRUCTURE_ALIGNMENT
                form += f"{gap}x"
                at += gap
                if inside:
                    offsets.append(at)
                else:
                    sizes.append(at - offsets[-1])
                continue
            size, code = FORMATS[letter]
            gap = -at % (MAP_ALIGNMENT if letter == MAP else size)
            form += f"{gap}x{code}"
            at += gap
            places.append(at)
            if not inside:
                offsets.append(at)
                sizes.append(size)
            at += size
        return cls(
            struct.Struct(form),
            tuple(offsets),
            tuple(sizes),
            tuple(places),
            signature.translate(_NO_BRACES),
        )
