"""A static report on the mma.sync kernels, from machine code compiled without a GPU: registers,
spills, shared memory, occupancy, the instruction mix of the main loop, and the bound that each unit
sets by the published rates of a GPU ("-" where none are). A prediction: nothing here has run.

    python benchmarks/machine_code_report.py

Writes benchmarks/machine_code.csv; docs/machine-code.md reads it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_rates import GPUS, UNITS, Gpu, occupancy, unit_clocks
from machine_code import Instruction, counted, disassembled, instructions, main_loop, mix

from sagepatch.backends.cuda.build import Compiled, Program, compile_program, nvrtc_version
from sagepatch.numerics.recipe import Recipe

COMMAND = "python benchmarks/machine_code_report.py"
HEAD_DIMS = (64, 128)
# In columns that need rates which are not published.
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Subject:
    """One kernel on one GPU: `rows` queries of a warp against `keys` keys are a tile; a block of
    threads takes `shared_bytes` beside what its machine code says.
    """

    family: str
    recipe: str
    head_dim: int
    gpu: Gpu
    program: Program
    rows: int
    keys: int
    threads: int
    shared_bytes: int

    @property
    def flops(self) -> int:
        """Operations of a tile of one warp that count: both products."""
        return 4 * self.rows * self.keys * self.head_dim


def subjects() -> Iterator[Subject]:
    """Every kernel of the mma.sync family, plain calls, at the usual head sizes."""
    from sagepatch.backends.cuda_mma.instances import recipes

    for gpu in GPUS:
        for head_dim in HEAD_DIMS:
            for recipe in recipes(gpu.target):
                yield mma(recipe, head_dim, gpu)


def mma(recipe: Recipe, head_dim: int, gpu: Gpu) -> Subject:
    """One kernel of the mma.sync family."""
    from sagepatch.backends.cuda_mma.tiles import Options, instance

    one = instance(recipe, head_dim, head_dim, gpu.target, Options())
    return Subject(
        *("cuda_mma", recipe.name, head_dim, gpu, one.program, 16 * one.tile.m_tiles),
        *(one.tile.block_n, one.tile.threads, one.shared_bytes),
    )


def hopper(recipe: Recipe, head_dim: int, gpu: Gpu) -> Subject:
    """One kernel of the Hopper family: 16 of a warpgroup's 64 rows are a warp's."""
    from sagepatch.backends.cuda.attention_tiles import Options, instance

    one = instance(recipe, head_dim, head_dim, Options())
    return Subject(
        *("cuda", recipe.name, head_dim, gpu, one.program, 16),
        *(one.tile.block_n, one.tile.threads, one.shared_bytes),
    )


def row(subject: Subject, compiled: Compiled) -> dict[str, Any]:
    """The report on one kernel. Counts and clocks are of one tile of one warp."""
    kernel = max(compiled.resources, key=lambda r: r.registers)
    turn = main_loop(instructions(disassembled(compiled.cubin)))
    tiles = tiles_in(turn, subject)
    opcodes = mix(turn)
    gpu = subject.gpu
    counts = {
        "tensor_integer": sum(one.mma_flops > 0 and one.opcode[0] == "I" for one in turn),
        "tensor_float": sum(one.mma_flops > 0 and one.opcode[0] != "I" for one in turn),
        "mufu": counted(opcodes, "MUFU"),
        "fp32": counted(opcodes, "FFMA", "FMUL", "FADD"),
        "half_to_fp32": counted(opcodes, "HADD2.F32"),
        "half": counted(opcodes, "HFMA2", "HMUL2", "HADD2") - counted(opcodes, "HADD2.F32"),
        "to_narrow": counted(opcodes, "F2FP", "F2F"),
        "int_to_float": counted(opcodes, "I2F", "I2FP"),
        "max": counted(opcodes, "FMNMX", "FMNMX3", "IMNMX", "VIMNMX", "VIMNMX3"),
        "shared_loads": counted(opcodes, "LDSM", "LDS"),
        "copies": counted(opcodes, "LDGSTS"),
        "shuffles": counted(opcodes, "SHFL"),
        "local": counted(opcodes, "LDL", "STL"),
    }
    return {
        "family": subject.family,
        "recipe": subject.recipe,
        "head_dim": subject.head_dim,
        "gpu": gpu.name,
        "target": gpu.target,
        "rows": subject.rows,
        "keys": subject.keys,
        "threads": subject.threads,
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "shared_bytes": subject.shared_bytes + kernel.shared_bytes,
        "warps": occupancy(
            gpu, kernel.registers, subject.shared_bytes + kernel.shared_bytes, subject.threads
        ),
        "instructions": round(len(turn) / tiles),
        **{name: round(count / tiles) for name, count in counts.items()},
        **bounds(turn, tiles, subject),
        "nvrtc": ".".join(map(str, nvrtc_version() or ())),
        "command": COMMAND,
    }


def bounds(turn: list[Instruction], tiles: int, subject: Subject) -> dict[str, str]:
    """Clocks of each unit for a tile, what that allows, and the least of it; all `UNKNOWN` on a GPU
    whose rates are not published.
    """
    gpu = subject.gpu
    ceilings = ("bound", "predicted_tops", "predicted_tops_without_overlap")
    if gpu.unrated:
        by_unit = [f"{what}_{unit}" for what in ("clocks", "tops") for unit in UNITS]
        return dict.fromkeys((*by_unit, *ceilings), UNKNOWN)
    clocks = {unit: busy / tiles for unit, busy in unit_clocks(turn, gpu).items()}
    bound = max(clocks, key=clocks.__getitem__)
    others = max(busy for unit, busy in clocks.items() if unit != "tensor")

    def tops(busy: float) -> str:
        return f"{subject.flops / busy * gpu.clocks_a_second / 1e12:.0f}"

    found = (bound, tops(clocks[bound]), tops(clocks["tensor"] + others))
    return {
        **{f"clocks_{unit}": f"{busy:.1f}" for unit, busy in clocks.items()},
        **{f"tops_{unit}": tops(busy) for unit, busy in clocks.items()},
        **dict(zip(ceilings, found, strict=True)),
    }


def tiles_in(turn: list[Instruction], subject: Subject) -> int:
    """How many tiles one turn of the loop works off. Raises ValueError where its products are not
    about a whole number of tiles.
    """
    ratio = sum(one.mma_flops for one in turn) / subject.flops
    tiles = round(ratio)
    # Row sums by the tensor core add a few columns.
    if tiles < 1 or not 0 <= ratio / tiles - 1 < 0.07:
        raise ValueError(f"{subject.recipe}: the loop holds {ratio:.2f} tiles")
    return tiles


def main() -> None:
    """Compile, read and write every row."""
    rows = []
    compiled: dict[Program, Compiled] = {}
    for subject in subjects():
        if subject.program not in compiled:
            compiled[subject.program] = compile_program(subject.program)
        rows.append(row(subject, compiled[subject.program]))
        one = rows[-1]
        print(
            f"{one['gpu']:9s} {one['recipe']:14s} {one['head_dim']:3d} {one['registers']:3d} reg "
            f"{one['stack_bytes']:3d} B {one['warps']:2d} warps {one['instructions']:4d} "
            f"{one['bound']:12s} {one['predicted_tops']:>5s} "
            f"({one['predicted_tops_without_overlap']})",
            flush=True,
        )
    with Path(__file__).with_name("machine_code.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
