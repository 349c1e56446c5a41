"""Reads the main loop of a kernel from its machine code, by the disassembler that Triton brings.
Pure but for `disassembled`; knows no kernel and no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"^(.*)`\((\.L_\w+)\)")
# Shapes in mnemonics: IMMA.16832 is m16n8k32, IGMMA.64x128x32 is m64n128k32, 16 rows of it a warp.
MMA = re.compile(r"^[IQH]MMA\.(16)(8)(\d+)|^[IQH]GMMA\.(64)x(\d+)x(\d+)")
# A loop has fewer ways through it than this; more would be a fault of the reader.
MOST_PATHS = 4096
WARP = 32


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its guard ("" for none), opcode with modifiers, operands, and where it jumps
    to, by line, for a branch inside the kernel.
    """

    guard: str
    opcode: str
    operands: str
    target: int | None = None

    @property
    def conditional(self) -> bool:
        """Whether a branch may fall through: a guard, or a predicate among its operands."""
        return bool(self.guard) or "P" in self.operands.split("`")[0]

    @property
    def mma_flops(self) -> int:
        """Operations of a tensor instruction as one warp sees it, 0 for all others."""
        shape = MMA.match(self.opcode)
        if shape is None:
            return 0
        m, n, k = (int(size) for size in shape.groups() if size)
        return 2 * min(m, 16) * n * k


def disassembled(cubin: bytes) -> str:
    """The listing of a cubin by Triton's nvdisasm."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [str(tool), "-c", str(path)], capture_output=True, text=True, check=True, timeout=120
        )
    return done.stdout


def instructions(listing: str) -> list[Instruction]:
    """Every instruction of a listing of one kernel, in order."""
    found: list[Instruction] = []
    jumps: list[str | None] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(found)
        if one := INSTRUCTION.search(line):
            guard, opcode, operands = one[1] or "", one[2], one[3].strip()
            target = TARGET.match(operands) if opcode.split(".")[0] == "BRA" else None
            found.append(Instruction(guard, opcode, operands))
            jumps.append(target[2] if target else None)
    return [
        one if jump is None else Instruction(one.guard, one.opcode, one.operands, labels[jump])
        for one, jump in zip(found, jumps, strict=True)
    ]


def main_loop(code: Sequence[Instruction]) -> list[Instruction]:
    """What one turn of the main loop runs: the innermost loop with tensor instructions and
    exponentials, on the way through it that skips the masks and does all the copies.

    Raises ValueError where there is no such loop.
    """
    loops = [
        (jump.target, at)
        for at, jump in enumerate(code)
        if jump.target is not None
        and jump.target <= at
        and any(one.mma_flops for one in code[jump.target : at])
    ]
    turns = []
    for start, end in loops:
        if any(a >= start and b <= end and (a, b) != (start, end) for a, b in loops):
            continue
        ways = [way for way in _ways(code, start, end) if _count(way, "MUFU.EX2")]
        if ways:
            turns.append(max(ways, key=_full_and_short))
    if not turns:
        raise ValueError("no loop of tensor instructions and exponentials")
    return max(turns, key=_full_and_short)


def mix(turn: Sequence[Instruction]) -> Counter[str]:
    """Instructions by opcode with modifiers."""
    return Counter(one.opcode for one in turn)


def counted(opcodes: Counter[str], *starts: str) -> int:
    """How many instructions begin with one of `starts`, up to a dot or the end."""
    return sum(
        count
        for opcode, count in opcodes.items()
        if any(opcode == start or opcode.startswith(start + ".") for start in starts)
    )


def _full_and_short(way: Sequence[Instruction]) -> tuple[int, int, int]:
    flops = sum(one.mma_flops for one in way)
    return flops, _count(way, "LDGSTS"), -len(way)


def _count(way: Sequence[Instruction], start: str) -> int:
    return sum(one.opcode.startswith(start) for one in way)


def _ways(code: Sequence[Instruction], start: int, end: int) -> Iterator[list[Instruction]]:
    """Every way from the head of a loop to its jump back; branches out of it are not taken."""
    found = 0
    open_ways: list[tuple[int, list[Instruction]]] = [(start, [])]
    while open_ways:
        at, way = open_ways.pop()
        while True:
            one = code[at]
            way.append(one)
            if at == end:
                found += 1
                if found > MOST_PATHS:
                    raise ValueError(f"over {MOST_PATHS} ways through a loop")
                yield way
                break
            ahead = one.target is not None and at < one.target <= end
            if ahead and one.conditional:
                assert one.target is not None
                open_ways.append((one.target, list(way)))
            elif ahead:
                assert one.target is not None
                at = one.target
                continue
            elif not one.conditional and (one.target is not None or one.opcode == "EXIT"):
                break
            at += 1
