"""Compiles the CUDA C++ sources of this folder at run time, through the NVRTC that torch installs:
no headers, no toolkit, no GPU. Keeps nothing and launches nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from sagepatch.backends.cuda.cubin import Resources, resources
from sagepatch.errors import MachineError

FOLDER = Path(__file__).parent
# Where sources lie besides, under names of their own.
BESIDE = (FOLDER.parent / "cuda_mma",)
# What is compiled for a GPU, by its architecture. Those with an "a" have features of their own
# (wgmma and setmaxnreg of Hopper).
TARGETS = {
    80: "sm_80",
    86: "sm_86",
    87: "sm_87",
    89: "sm_89",
    90: "sm_90a",
    120: "sm_120a",
    121: "sm_121a",
}
OPTIONS = ("-std=c++17", "-default-device")
# The first NVRTC whose PTX has all that the sources use.
OLDEST_NVRTC = (12, 8)
INSTALL = 'pip install "cuda-bindings>=13" "nvidia-cuda-nvrtc>=13"'
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Program:
    """What is compiled: a source file of this folder, or of one beside it, with its macros, for one
    target.

    `defines` become `-Dname=value`, in order. Files that the source includes by `#include "name"`
    are taken from the same folders. Kernels are `extern "C"`, so that their names are their own.
    """

    source: str
    defines: tuple[tuple[str, int | float | str], ...] = ()
    target: str = "sm_90a"
    options: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options for NVRTC."""
        macros = tuple(f"-D{name}={value}" for name, value in self.defines)
        return (f"--gpu-architecture={self.target}", *OPTIONS, *self.options, *macros)

    def text(self) -> dict[str, str]:
        """The source and everything that it includes, by file name; the source comes first."""
        found: dict[str, str] = {}
        wanted = [self.source]
        while wanted:
            name = wanted.pop(0)
            if name not in found:
                found[name] = _read(name)
                wanted += _INCLUDE.findall(found[name])
        return found

    def key(self, nvrtc: tuple[int, int]) -> str:
        """What the machine code depends on, as one hash: sources, options, NVRTC's version."""
        digest = sha256()
        for part in (*self.arguments, *(f"{n}\0{t}" for n, t in self.text().items()), repr(nvrtc)):
            digest.update(part.encode() + b"\0\0")
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and what the compiler said about it (ptxas warns of serialised wgmma here)."""

    cubin: bytes = field(repr=False)
    log: str = ""

    @property
    def resources(self) -> tuple[Resources, ...]:
        """What each kernel takes."""
        return resources(self.cubin)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels."""
        return tuple(r.kernel for r in self.resources)


def compile_program(program: Program) -> Compiled:
    """Compile one program, about 0.4 s; needs no GPU.

    Raises `MachineError` where NVRTC is missing or too old, or refuses the source.

    >>> compile_program(Program("prepass.cu", ...)).kernels  # doctest: +SKIP
    ('quantise', 'statistics')
    """
    why = missing(program.target)
    if why is not None:
        raise MachineError(why)
    from cuda.bindings import nvrtc

    source, *included = program.text().items()
    (handle,) = _values(
        nvrtc.nvrtcCreateProgram(
            source[1].encode(),
            source[0].encode(),
            len(included),
            [text.encode() for _, text in included],
            [name.encode() for name, _ in included],
        )
    )
    try:
        arguments = [argument.encode() for argument in program.arguments]
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(arguments), arguments)
        (size,) = _values(nvrtc.nvrtcGetProgramLogSize(handle))
        log = _buffer(size)
        _values(nvrtc.nvrtcGetProgramLog(handle, log))
        said = log.decode(errors="replace").strip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            version = ".".join(map(str, nvrtc_version() or ()))
            raise MachineError(
                f"NVRTC {version} cannot compile {program.source} for {program.target} "
                f"({status.name}): {said}"
            )
        (size,) = _values(nvrtc.nvrtcGetCUBINSize(handle))
        data = _buffer(size)
        _values(nvrtc.nvrtcGetCUBIN(handle, data))
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Compiled(data, said)


@cache
def nvrtc_version() -> tuple[int, int] | None:
    """The version of the NVRTC that will be used; None where none can be loaded."""
    try:
        from cuda.bindings import nvrtc

        major, minor = _values(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, MachineError):
        # cuda-bindings raises RuntimeError, or a subclass of it, where the library is not found.
        return None
    return int(major), int(minor)


@cache
def missing(target: str) -> str | None:
    """A sentence saying why nothing can be compiled for `target` here; None when it can."""
    found = nvrtc_version()
    if found is None:
        return f"the run-time compiler NVRTC and its Python bindings are not installed ({INSTALL})"
    if found < OLDEST_NVRTC:
        return (
            f"NVRTC is {found[0]}.{found[1]}, the CUDA kernels need "
            f"{OLDEST_NVRTC[0]}.{OLDEST_NVRTC[1]} or newer ({INSTALL})"
        )
    from cuda.bindings import nvrtc

    (served,) = _values(nvrtc.nvrtcGetSupportedArchs())
    wanted = int(re.sub(r"\D", "", target))
    if wanted not in served:
        return f"NVRTC {found[0]}.{found[1]} knows no {target} ({INSTALL})"
    return None


def _read(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file name")
    found = next((f / name for f in (FOLDER, *BESIDE) if (f / name).exists()), FOLDER / name)
    return found.read_text(encoding="utf-8")


def _buffer(size: int) -> bytes:
    """Bytes that NVRTC may write `size` of. Python shares one object for all equal single bytes, so
    a buffer of one, as for an empty log, would change b" " everywhere.
    """
    return bytes(max(size, 2))


def _values(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What follows the status in an answer of NVRTC; raises where the status is no success."""
    if int(answer[0]) != 0:
        raise MachineError(f"NVRTC answers {answer[0].name}")
    return answer[1:]
