"""Counts the instructions of the main loop of the Triton attention kernels, from machine code for
sm_90 compiled without a GPU, and the clocks that each unit needs for one tile.

    python benchmarks/triton_sass.py > benchmarks/triton_sass.csv

Rates per multiprocessor and clock: 4 instructions issued, 16 exponentials, 8192 8-bit or 4096 FP16
tensor operations. A kernel cannot be faster than its slowest unit; how far it stays behind all of
them is what they take from each other.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "backends"))
from triton_compile import build_attention

from sagepatch.backends.triton.tiles import pick
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import MaskKind

NAMES = ("sage2_8b_k128", "sage2_8", "sage2pp_8_d4", "sage2pp_8", "sage1_vb", "sage1_b")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COLUMNS = [
    *("recipe", "head_dim", "block_m", "block_n", "registers", "shared_bytes", "instructions"),
    *("ex2", "ffma", "fadd", "int_to_float", "convert", "max", "shuffle"),
    *("issue_clocks", "ex2_clocks", "tensor_clocks", "triton"),
]


def main_loop(cubin: bytes) -> tuple[Counter[str], int]:
    """Instructions by opcode of the innermost loop that holds tensor instructions, and registers a
    thread.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _run("nvdisasm", "-c", str(path))
        usage = _run("cuobjdump", "-res-usage", str(path))
    lines = [line for line in listing.splitlines() if "/*" in line or line.startswith(".L")]
    labels: dict[str, int] = {}
    loops = []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = number
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] : number + 1]
            exponentials = sum("MUFU.EX2" in one for one in body)
            if exponentials > 16 and any("GMMA" in one for one in body):
                loops.append(body)
    opcodes: Counter[str] = Counter()
    for line in min(loops, key=len):
        if opcode := re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", line):
            opcodes[opcode[1]] += 1
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    return opcodes, int(registers[1])


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def main() -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for head_dim in (64, 128):
        for name in NAMES:
            recipe = RECIPES[name]
            tile = pick(90, recipe, head_dim, False, MaskKind.NONE)
            kernel = build_attention(90, recipe, tile, head_dim)
            counts, registers = main_loop(kernel.asm["cubin"])
            total = sum(counts.values())
            scores = tile.block_m * tile.block_n
            products = 2 * scores * head_dim
            tensor = products / 8192 + products / (4096 if recipe.pv == "fp16" else 8192)
            writer.writerow(
                [
                    *(name, head_dim, tile.block_m, tile.block_n, registers),
                    *(kernel.metadata.shared, total, counts["MUFU"], counts["FFMA"]),
                    *(counts["FADD"], counts["I2FP"], counts["F2FP"]),
                    *(counts["VIMNMX3"] + counts["VIMNMX"] + counts["FMNMX"], counts["SHFL"]),
                    *(total * tile.warps // 4, scores // 16, round(tensor), triton.__version__),
                ]
            )


if __name__ == "__main__":
    main()
