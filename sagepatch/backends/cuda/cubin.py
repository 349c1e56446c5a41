"""Reads what a cubin says of its kernels: registers, stack, shared memory, parameters. Pure: bytes
in, facts out.

The layout is that of ELF64; the attributes of `.nv.info` are documented nowhere and read here as
`cuobjdump` prints them, which a test compares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"\x7fELF"
# Attributes of .nv.info: (format, attribute, size or value).
_FORMAT_SIZED = 4
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17
_SHT_SYMTAB = 2


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes. `stack_bytes` is the memory of a thread outside its registers: spilled
    ones, and arrays that are indexed at run time. `params` are (offset, bytes) of each parameter.
    """

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    params: tuple[tuple[int, int], ...]


def is_cubin(data: bytes) -> bool:
    """Whether `data` begins as an ELF file does."""
    return data[:4] == MAGIC


def resources(data: bytes) -> tuple[Resources, ...]:
    """Each kernel of a cubin, by name. Raises ValueError where `data` is no whole ELF file."""
    try:
        return _resources(data)
    except (struct.error, IndexError) as error:
        raise ValueError(f"no readable cubin of {len(data)} bytes: {error}") from error


def _resources(data: bytes) -> tuple[Resources, ...]:
    if not is_cubin(data):
        raise ValueError("no ELF file")
    sections = _sections(data)
    symbols = _symbols(data, sections)
    registers: dict[str, int] = {}
    stack: dict[str, int] = {}
    for attribute, value in _attributes(sections.get(".nv.info", b"")):
        if attribute in (_REGCOUNT, _FRAME_SIZE) and len(value) == 8:
            symbol, count = struct.unpack("<II", value)
            (registers if attribute == _REGCOUNT else stack)[symbols[symbol]] = count
    found = []
    for section, body in sections.items():
        if not section.startswith(".nv.info."):
            continue
        kernel = section.removeprefix(".nv.info.")
        params = []
        for attribute, value in _attributes(body):
            if attribute == _KPARAM_INFO:
                # index, ordinal, offset, then flags with the size in the upper 14 bits
                _, ordinal, offset, flags = struct.unpack("<IHHI", value)
                params.append((ordinal, offset, flags >> 18))
        found.append(
            Resources(
                kernel,
                registers.get(kernel, 0),
                stack.get(kernel, 0),
                _size(data, f".nv.shared.{kernel}"),
                tuple((offset, size) for _, offset, size in sorted(params)),
            )
        )
    return tuple(sorted(found, key=lambda r: r.kernel))


def _headers(data: bytes) -> list[tuple[str, int, int, int]]:
    """(name, type, offset, size) of each section."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + entry * i) for i in range(count)]
    strings = rows[names][4]
    return [(_text(data, strings + row[0]), row[1], row[4], row[5]) for row in rows]


def _sections(data: bytes) -> dict[str, bytes]:
    return {name: data[at : at + size] for name, _, at, size in _headers(data)}


def _size(data: bytes, section: str) -> int:
    return next((size for name, _, _, size in _headers(data) if name == section), 0)


def _symbols(data: bytes, sections: dict[str, bytes]) -> list[str]:
    names = sections.get(".strtab", b"")
    table = next((s for s in _headers(data) if s[1] == _SHT_SYMTAB), None)
    if table is None:
        return []
    _, _, at, size = table
    starts = [struct.unpack_from("<I", data, at + 24 * i)[0] for i in range(size // 24)]
    return [_text(names, start) for start in starts]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _attributes(body: bytes) -> list[tuple[int, bytes]]:
    """(attribute, value) of each entry of a .nv.info section that carries a sized value."""
    found = []
    at = 0
    while at + 4 <= len(body):
        kind, attribute, size = struct.unpack_from("<BBH", body, at)
        at += 4
        if kind == _FORMAT_SIZED:
            found.append((attribute, body[at : at + size]))
            at += size
    return found
