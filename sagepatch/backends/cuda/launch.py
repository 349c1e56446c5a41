"""Loads compiled kernels and launches them on torch's current stream, through the driver. Knows no
arithmetic.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch

from sagepatch.backends.cuda.build import Program, nvrtc_version
from sagepatch.backends.cuda.build import missing as missing_compiler
from sagepatch.backends.cuda.cache import kept
from sagepatch.backends.driver import Config, enter, launcher, words
from sagepatch.backends.driver import tensor_map as encode
from sagepatch.backends.links import Argument, Link
from sagepatch.backends.parameters import MAP_ALIGNMENT, Layout

# Shared memory that a kernel has without asking for more.
_PLAIN_SHARED_BYTES = 48 << 10
_MOST_MAPS = 8192

# What `_loaded` gave, and a lock a program: several are compiled at once, none twice.
_LIBRARIES: dict[Program, tuple[Any, dict[str, tuple[int, ...]]]] = {}
_LOADING: dict[Program, threading.Lock] = {}
_LOADING_LOCK = threading.Lock()


def _forget_locks() -> None:
    """In a process forked while another thread held one: nobody there would ever let it go."""
    global _LOADING_LOCK
    _LOADING.clear()
    _LOADING_LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


@cache
def missing(target: str) -> str | None:
    """A sentence saying why the CUDA kernels cannot run here; None when they can."""
    why = missing_compiler(target)
    if why is not None:
        return why
    compiler = nvrtc_version()
    assert compiler is not None
    found = driver_version()
    if found is None:
        return "no NVIDIA driver can be loaded: check nvidia-smi"
    if found[0] < compiler[0]:
        return (
            f"the NVIDIA driver serves CUDA {found[0]}.{found[1]}, and NVRTC {compiler[0]}."
            f"{compiler[1]} makes code for CUDA {compiler[0]}.0 or newer: update the driver, or "
            f"install a torch for CUDA {found[0]}"
        )
    return None


@cache
def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver serves; None without a driver."""
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):
        # cuda-bindings raises RuntimeError, or a subclass of it, where the library is not found.
        return None
    return None if int(status) else (version // 1000, version % 1000 // 10)


class _Frame:
    """Memory for the parameters and settings of one launch, for one call at a time."""

    def __init__(self, kernel: Kernel) -> None:
        layout = kernel.layout
        self.memory = ctypes.create_string_buffer(layout.packer.size + MAP_ALIGNMENT)
        self.start = -ctypes.addressof(self.memory) % MAP_ALIGNMENT
        first = ctypes.addressof(self.memory) + self.start
        self.pointers = (ctypes.c_void_p * len(layout.offsets))(
            *(first + offset for offset in layout.offsets)
        )
        self.config = Config.of(0, kernel.threads, kernel.shared_bytes, kernel.programmatic)
        self.addresses = ctypes.addressof(self.config), ctypes.addressof(self.pointers)


@dataclass(eq=False)
class Kernel:
    """A loaded kernel. Call it inside `torch.cuda.device` of the tensors' device.

    `threads` a block; `shared_bytes` of dynamic shared memory; `programmatic`: the launch may begin
    before the kernel in front of it in the stream has ended, and the kernel waits for that one
    itself (griddepcontrol.wait).
    """

    name: str
    handle: Any
    function: int
    layout: Layout
    threads: int
    shared_bytes: int
    programmatic: bool
    _devices: set[int] = field(default_factory=set)
    # The driver copies parameters before a launch returns: memory of one serves the next. Popping
    # and appending are atomic.
    _free: list[_Frame] = field(default_factory=list)

    def __call__(self, device: int, blocks: int, *args: int | float | bytes) -> None:
        """Launch `blocks` blocks on the current stream of CUDA device number `device`.

        Pointers are integers (`Tensor.data_ptr()`, 0 for none), tensor maps what `tensor_map`
        gives. Raises RuntimeError with the driver's words where it refuses.
        """
        try:
            frame = self._free.pop()
        except IndexError:
            frame = _Frame(self)
        if device not in self._devices:
            self._prepare(device)
        enter(device)
        self.layout.packer.pack_into(frame.memory, frame.start, *args)
        frame.config.grid_x = blocks
        frame.config.stream = torch._C._cuda_getCurrentRawStream(device)
        config, params = frame.addresses
        status = launcher()(config, self.function, params, None)
        if status:
            raise RuntimeError(f"kernel {self.name} with {blocks} blocks: {words(status)}")
        self._free.append(frame)

    def link(self, blocks: int, args: Sequence[Argument]) -> Link:
        """This launch as a link of a chain on the current device."""
        device = torch.cuda.current_device()
        if device not in self._devices:
            self._prepare(device)
        return Link(
            self.name,
            self.function,
            blocks,
            self.threads,
            self.shared_bytes,
            self.layout,
            tuple(args),
            self.programmatic,
            self,
        )

    def _prepare(self, device: int) -> None:
        """Once a device: ask for the dynamic shared memory."""
        from cuda.bindings import driver

        enter(device)
        if self.shared_bytes > _PLAIN_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (number,) = _values(driver.cuDeviceGet(device))
            _values(driver.cuKernelSetAttribute(attribute, self.shared_bytes, self.handle, number))
        self._devices.add(device)


def load(
    program: Program,
    name: str,
    signature: str,
    *,
    threads: int,
    shared_bytes: int = 0,
    programmatic: bool = False,
) -> Kernel:
    """Kernel `name` of a program, compiled where the cache has it not; loaded once a process.

    `signature` is one letter a parameter (`Layout.of`); ValueError where the machine code has other
    parameters.
    """
    library, params = _library(program)
    layout = Layout.of(signature)
    if name not in params:
        raise ValueError(f"{program.source} has no kernel {name}: {', '.join(params)}")
    if layout.sizes != params[name]:
        raise ValueError(
            f"kernel {name} of {program.source} takes parameters of {params[name]} bytes, "
            f"signature {signature!r} gives {layout.sizes}"
        )
    return _load(program, library, name, layout, threads, shared_bytes, programmatic)


@cache
def _load(
    program: Program,
    library: Any,
    name: str,
    layout: Layout,
    threads: int,
    shared_bytes: int,
    programmatic: bool,
) -> Kernel:
    from cuda.bindings import driver

    (kernel,) = _values(driver.cuLibraryGetKernel(library, name.encode()))
    # The driver takes a kernel of a library for a function wherever it launches one.
    return Kernel(name, kernel, int(kernel), layout, threads, shared_bytes, programmatic)


def _library(program: Program) -> tuple[Any, dict[str, tuple[int, ...]]]:
    found = _LIBRARIES.get(program)
    if found is None:
        with _LOADING_LOCK:
            lock = _LOADING.setdefault(program, threading.Lock())
        with lock:
            found = _LIBRARIES.get(program)
            if found is None:
                found = _LIBRARIES[program] = _loaded(program)
    return found


def _loaded(program: Program) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The driver's handle, good in every context, and the sizes of each kernel's parameters."""
    from cuda.bindings import driver

    made = kept(program)
    params = {r.kernel: tuple(size for _, size in r.params) for r in made.resources}
    # torch initialises the driver, too.
    _values(driver.cuInit(0))
    (library,) = _values(driver.cuLibraryLoadData(made.cubin, [], [], 0, [], [], 0))
    return library, params


# Bytes an element, and the number of the type in cuda.h.
_MAP_TYPES = {
    torch.int8: (1, 0),
    torch.uint8: (1, 0),
    torch.float8_e4m3fn: (1, 0),
    torch.float16: (2, 6),
    torch.float32: (4, 7),
    torch.bfloat16: (2, 9),
}
# What cuda.h numbers, in order.
_SWIZZLES = (0, 32, 64, 128)
_PROMOTIONS = (0, 64, 128, 256)


@lru_cache(maxsize=_MOST_MAPS)
def tensor_map(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int = 0,
    promotion_bytes: int = 128,
) -> bytes:
    """A tensor map for TMA, 128 bytes, to be passed as a `__grid_constant__` parameter.

    `shape`, `box` and `strides` count elements, outermost axis first, as torch does; the last
    stride is 1 and not given. What lies outside the shape is read as zero. `swizzle_bytes` and
    `promotion_bytes` (of a fetch into L2) are 0, 32 (swizzle only), 64, 128 or 256 (promotion
    only).
    """
    element_bytes, kind = _MAP_TYPES[dtype]
    return encode(
        *(pointer, kind, element_bytes, shape, strides, box),
        _SWIZZLES.index(swizzle_bytes),
        _PROMOTIONS.index(promotion_bytes),
    )


def _values(answer: Sequence[Any]) -> Sequence[Any]:
    """What follows the status in an answer of the driver; raises where it is no success."""
    from cuda.bindings import driver

    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {words(int(answer[0]))}")
    return answer[1:]
