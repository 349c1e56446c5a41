"""The few functions of the CUDA driver that every launch needs, through ctypes: a call costs the
host a fraction of what it does through objects. Knows no kernel.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache

# (configuration, function, parameters, None), as addresses; gives the driver's status.
Launcher = Callable[[int, int, int, None], int]
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h.
_PROGRAMMATIC = 6


class _Thread(threading.local):
    """What a thread has done: nothing yet."""

    entered = False


THREAD = _Thread()


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, for values of one int."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h, with room for the one attribute that we use."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("attribute", Attribute),
    )

    @classmethod
    def of(cls, blocks: int, threads: int, shared_bytes: int, programmatic: bool) -> Config:
        """A launch of `blocks` blocks along one axis. It must not be copied: it holds an address
        inside itself.
        """
        made = cls(blocks, 1, 1, threads, 1, 1, shared_bytes)
        if programmatic:
            made.attribute.id, made.attribute.value = _PROGRAMMATIC, 1
            made.attributes = ctypes.addressof(made) + Config.attribute.offset
            made.count = 1
        return made


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def available() -> bool:
    """Whether the driver can be loaded."""
    try:
        _library()
    except OSError:
        return False
    return True


@cache
def launcher() -> Launcher:
    """cuLaunchKernelEx."""
    launch = _library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    launch.restype = ctypes.c_int
    found: Launcher = launch
    return found


# CUtensorMapL2promotion of cuda.h.
PROMOTION_128_BYTES = 2
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


def tensor_map(
    pointer: int,
    kind: int,
    element_bytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    promotion: int,
) -> bytes:
    """A tensor map for TMA, 128 bytes; `kind`, `swizzle` and `promotion` as cuda.h numbers them.

    `shape`, `box` and `strides` count elements, outermost axis first; the last stride is 1 and not
    given. What lies outside the shape is read as zero.
    """
    rank = len(shape)
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    first = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(memory) + first),
        kind,
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * max(1, rank - 1))(*(s * element_bytes for s in reversed(strides))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
        0,
        swizzle,
        promotion,
        0,
    )
    if status:
        raise RuntimeError(
            f"tensor map of {tuple(shape)} by {tuple(strides)}, box {tuple(box)}: {words(status)}"
        )
    return memory.raw[first : first + _MAP_BYTES]


def enter(device: int) -> None:
    """Give a thread that has never used CUDA the context that torch made for `device`."""
    if THREAD.entered:
        return
    driver = _library()
    context, number = ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuInit(0))
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(driver.cuDeviceGet(ctypes.byref(number), device))
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
        _check(driver.cuCtxSetCurrent(context))
    THREAD.entered = True


def words(status: int) -> str:
    """What the driver says of a status."""
    found = []
    for ask in (_library().cuGetErrorName, _library().cuGetErrorString):
        text = ctypes.c_char_p()
        ask(status, ctypes.byref(text))
        found.append(text.value.decode() if text.value else "no text")
    return f"{found[0]} ({found[1]})"


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA driver: {words(status)}")
