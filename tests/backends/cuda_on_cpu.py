"""Runs CUDA C++ sources of the package on a CPU: compiled by the C++ compiler of the machine with
cuda_on_cpu.h in place of ptx.cuh, mma_on_cpu.h in place of mma.cuh. Slow, exact, and needs no GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import Layout

COMPILER = shutil.which("g++") if sys.platform == "linux" else None
HEADER = Path(__file__).with_suffix(".h")
# What is replaced, by what beside HEADER.
REPLACED = {"ptx.cuh": None, "mma.cuh": HEADER.with_name("mma_on_cpu.h")}
OPTIONS = ("-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-fno-gnu-unique")
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(([^)]*)\)')


class CpuKernel:
    """Called as `launch.Kernel` is; returns when all blocks are done."""

    def __init__(self, program: Program, name: str, signature: str, threads: int) -> None:
        self.run = getattr(_library(program), f"run_{name}")
        self.layout = Layout.of(signature)
        self.threads = threads

    def __call__(self, device: int | None, blocks: int, *args: Any) -> None:
        memory = ctypes.create_string_buffer(self.layout.packer.size)
        self.layout.packer.pack_into(memory, 0, *args)
        start = ctypes.addressof(memory)
        pointers = (ctypes.c_void_p * len(self.layout.offsets))(
            *(start + offset for offset in self.layout.offsets)
        )
        self.run(blocks, self.threads, pointers)


def load(program: Program, name: str, signature: str, *, threads: int, **_: Any) -> CpuKernel:
    """In place of `launch.load`."""
    return CpuKernel(program, name, signature, threads)


@cache
def available() -> bool:
    """Whether a C++ compiler is here that knows all that cuda_on_cpu.h uses (GCC 12 does)."""
    if COMPILER is None:
        return False
    library = Path(_folder().name) / "header.so"
    command = [COMPILER, *OPTIONS, "-x", "c++", str(HEADER), "-o", str(library)]
    return subprocess.run(command, capture_output=True).returncode == 0


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sagepatch-cuda-on-cpu-")


@cache
def _library(program: Program) -> ctypes.CDLL:
    assert COMPILER is not None
    text = HEADER.read_text(encoding="utf-8") + _expanded(program.source, program.text())
    for name, parameters in KERNEL.findall(text):
        types = [p.strip().rsplit(" ", 1)[0] for p in parameters.split(",")]
        values = ", ".join(f"*({kind}*)args[{i}]" for i, kind in enumerate(types))
        text += (
            f'\nextern "C" void run_{name}(int blocks, int threads, void** args) '
            f"{{ run_blocks(blocks, threads, [=] {{ {name}({values}); }}); }}\n"
        )
    stem = Path(_folder().name) / program.key((0, 0))[:24]
    source, library = stem.with_suffix(".cpp"), stem.with_suffix(".so")
    source.write_text(text, encoding="utf-8")
    macros = [f"-D{name}={value}" for name, value in program.defines]
    subprocess.run([COMPILER, *OPTIONS, *macros, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _expanded(name: str, files: dict[str, str]) -> str:
    if name in REPLACED:
        other = REPLACED[name]
        return "" if other is None else other.read_text(encoding="utf-8")

    def included(match: re.Match[str]) -> str:
        return _expanded(match[1], files)

    return re.sub(r'^#include "([^"]+)"$', included, files[name], flags=re.MULTILINE)
