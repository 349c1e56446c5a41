"""What the units of each GPU do in a clock, as published, and what a turn of a loop asks of them.
Pure.

Sources. Tensor cores, multiprocessors and clocks: NVIDIA's architecture papers (A100; GA102; Ada;
RTX Blackwell), whose peaks `Gpu.peaks` repeats and a test recomputes. Arithmetic: CUDA C++ Best
Practices Guide, "Throughput of Native Arithmetic Instructions". Shared memory: 128 bytes a clock.
For sm_90 both are what we measured. Not published, and taken from sm_90: 64 packed conversions
(F2FP) and 64 conversions of a half (HADD2.F32) a clock. Warps, blocks and shared memory of a
multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from machine_code import WARP, Instruction, counted

SHARED_BYTES_A_CLOCK = 128
SCHEDULERS = 4
# Of a multiprocessor, in the order of `unit_clocks`.
UNITS = ("tensor", "exponentials", "fma", "alu", "shared", "issue")
REGISTERS = 65536
# Registers are dealt out to warps in pieces of so many.
REGISTER_UNIT = 256
# What the driver keeps of shared memory for a block of threads.
RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates are lanes, or for tensor cores operations, a clock and multiprocessor; `peaks`
    are its published dense tera operations a second by kind of product. `unrated` says why no
    ceiling is given, where rates are not published: occupancy alone is known then.
    """

    name: str
    target: str
    multiprocessors: int
    clock_mhz: int
    tensor: dict[str, int]
    peaks: dict[str, float]
    fp32: int = 128
    half2: int = 64
    integer_add: int = 64
    warps: int = 48
    blocks: int = 24
    shared_bytes: int = 100 << 10
    native_int4: bool = True
    unrated: str = ""

    @property
    def clocks_a_second(self) -> float:
        """Multiprocessors times clock."""
        return self.multiprocessors * self.clock_mhz * 1e6


_FULL = {"s8": 2048, "s4": 4096, "f16->f16": 1024, "f16->f32": 512}
_FP8 = {"e4m3->f16": 2048, "e4m3->f32": 1024}

GPUS = (
    Gpu(
        "A100",
        "sm_80",
        108,
        1410,
        {"s8": 4096, "s4": 8192, "f16->f16": 2048, "f16->f32": 2048},
        {"s8": 624, "s4": 1248, "f16->f16": 312, "f16->f32": 312},
        fp32=64,
        half2=128,
        warps=64,
        blocks=32,
        shared_bytes=164 << 10,
    ),
    Gpu(
        "RTX 3090",
        "sm_86",
        82,
        1695,
        _FULL,
        {"s8": 284, "s4": 568, "f16->f16": 142, "f16->f32": 71},
        blocks=16,
    ),
    Gpu(
        "Jetson Orin",
        "sm_87",
        0,
        0,
        {},
        {},
        blocks=16,
        shared_bytes=164 << 10,
        unrated="of Orin's tensor cores the INT8 peak alone is published, no rate of FP16 products "
        "by kind of sum",
    ),
    Gpu(
        "RTX 4090",
        "sm_89",
        128,
        2520,
        _FULL | _FP8,
        {
            "s8": 660.6,
            "s4": 1321.2,
            "f16->f16": 330.3,
            "f16->f32": 165.2,
            "e4m3->f16": 660.6,
            "e4m3->f32": 330.3,
        },
    ),
    Gpu(
        "RTX 5090",
        "sm_120a",
        170,
        2407,
        {name: rate for name, rate in (_FULL | _FP8).items() if name != "s4"},
        {"s8": 838, "f16->f16": 419, "f16->f32": 209.5, "e4m3->f16": 838, "e4m3->f32": 419},
        integer_add=128,
        native_int4=False,
    ),
    Gpu(
        "GB10",
        "sm_121a",
        0,
        0,
        {},
        {},
        native_int4=False,
        unrated="of GB10's tensor cores the sparse FP4 peak alone is published, no rate of INT8, "
        "FP16 or E4M3 products",
    ),
    Gpu(
        "H200",
        "sm_90a",
        132,
        1830,
        {
            "wgmma s8": 8192,
            "wgmma e4m3": 8192,
            "wgmma f16": 4096,
            "s8": 4825,
            "f16->f16": 2553,
            "f16->f32": 2473,
        },
        {"wgmma s8": 1979, "wgmma e4m3": 1979, "wgmma f16": 989},
        half2=120,
        warps=64,
        blocks=32,
        shared_bytes=228 << 10,
        native_int4=False,
    ),
)

# Bytes of a warp's shared-memory access by the width in its mnemonic.
_WIDTHS = {"128": 512, "64": 256}


def kind_of(one: Instruction) -> str:
    """The product of a tensor instruction, as `Gpu.tensor` names it."""
    family, *parts = one.opcode.split(".")
    if "GMMA" in family:
        return {"I": "wgmma s8", "Q": "wgmma e4m3", "H": "wgmma f16"}[family[0]]
    if family == "IMMA":
        return "s4" if "S4" in parts else "s8"
    result = "f16" if "F16" in parts else "f32"
    return f"{'e4m3' if family == 'QMMA' else 'f16'}->{result}"


def unit_clocks(turn: list[Instruction], gpu: Gpu) -> dict[str, float]:
    """Clocks of a multiprocessor that each unit is busy with one turn of one warp.

    `tensor`; `exponentials` with all that shares their unit; `fma` (FP32 and half arithmetic,
    integer multiplications); `alu` (integers, logic, comparisons, conversions); `shared` (shared
    memory and shuffles); `issue`. Raises KeyError for a product that the GPU has no rate for.
    """
    opcodes: Counter[str] = Counter(one.opcode for one in turn)
    tensor = sum(one.mma_flops / gpu.tensor[kind_of(one)] for one in turn if one.mma_flops)

    def clocks(rate: int, *starts: str) -> float:
        return counted(opcodes, *starts) * WARP / rate

    converted = counted(opcodes, "HADD2.F32")
    fma = (
        clocks(gpu.fp32, "FFMA", "FMUL", "FADD")
        + clocks(gpu.half2, "HFMA2", "HMUL2", "HADD2")
        + converted * WARP * (1 / 64 - 1 / gpu.half2)
        + clocks(64, "IMAD")
    )
    alu = clocks(64, *_ALU) + clocks(gpu.integer_add, *_ADDS)
    return {
        "tensor": tensor,
        "exponentials": clocks(16, "MUFU", "I2F", "F2I", "F2F", "POPC"),
        "fma": fma,
        "alu": alu,
        "shared": sum(_shared_clocks(one.opcode) for one in turn),
        "issue": len(turn) / SCHEDULERS,
    }


_ALU = (
    *("FMNMX", "FMNMX3", "FSETP", "FSEL", "FSET", "I2FP", "F2FP", "LOP3", "LOP", "PLOP3", "SHF"),
    *("SHL", "SHR", "LEA", "PRMT", "SEL", "ISETP", "MOV", "P2R", "R2P", "SGXT", "BMSK", "VABSDIFF"),
    *("VIMNMX3", "FCHK", "VOTE"),
)
_ADDS = ("IADD3", "IADD", "VIADD", "IMNMX", "VIMNMX", "IABS")


def _shared_clocks(opcode: str) -> float:
    family, *parts = opcode.split(".")
    if family == "SHFL":
        return 1.0
    if family == "LDSM":
        # Matrices of 8 rows of 16 bytes.
        return int(parts[-1]) * 128 / SHARED_BYTES_A_CLOCK if parts[-1] in "24" else 1.0
    if family in ("LDS", "STS", "LDGSTS"):
        return next((_WIDTHS[p] for p in parts if p in _WIDTHS), 128) / SHARED_BYTES_A_CLOCK
    return 0.0


def occupancy(gpu: Gpu, registers: int, shared_bytes: int, threads: int) -> int:
    """Warps that a multiprocessor holds of a kernel with so many registers a thread."""
    warps = threads // WARP
    a_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // a_warp // warps
    by_shared = gpu.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES)
    return warps * min(by_registers, by_shared, gpu.warps // warps, gpu.blocks)
