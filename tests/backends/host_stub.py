"""The host's side of a call on a GPU, without one: tensors stay on the CPU, and what the driver
would launch is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sagepatch.backends import chain, memory, prepared
from sagepatch.backends.cuda import attention, launch, prepass
from sagepatch.backends.driver import Config
from sagepatch.backends.parameters import Layout

STREAM = 64


@dataclass(eq=False)
class Compiled:
    """What of a kernel that Triton compiled makes a launch."""

    src: Any
    metadata: Any
    asm: Any
    function: int


class Driver:
    """Gives memory, and takes launches: for each (function, blocks, threads, stream, bytes of the
    parameters).
    """

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int, int | None, bytes]] = []
        self.layouts: dict[int, Layout] = {}
        self.status = 0
        # Scratch memory in use and given back, by its address, and how much was asked for on which
        # stream.
        self.taken: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.asked: list[tuple[int, int]] = []

    def __call__(self, config: int, function: int, params: int, extra: None) -> int:
        said = Config.from_address(config)
        layout = self.layouts[function]
        found = (ctypes.c_void_p * len(layout.offsets)).from_address(params)
        memory = bytearray(layout.packer.size)
        for at, size, pointer in zip(layout.offsets, layout.sizes, found, strict=True):
            memory[at : at + size] = ctypes.string_at(pointer, size)
        self.launches.append((function, said.grid_x, said.block_x, said.stream, bytes(memory)))
        return self.status

    def empty(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """As memory.empty."""
        return torch.empty_strided(shape, strides, dtype=dtype)

    def take(self, size: int, stream: int) -> int:
        """As memory.take: what was given back comes first, as from torch's allocator."""
        self.asked.append((size, stream))
        fits = (at for at, held in self.given.items() if held.numel() == size)
        found = next(fits, None)
        held = torch.empty(size, dtype=torch.uint8) if found is None else self.given.pop(found)
        self.taken[held.data_ptr()] = held
        return held.data_ptr()

    def give(self, address: int) -> None:
        """As memory.give."""
        self.given[address] = self.taken.pop(address)

    def values(self, number: int) -> tuple[Any, ...]:
        """The parameters of a launch."""
        function, *_, memory = self.launches[number]
        return self.layouts[function].packer.unpack(memory)


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Let both CUDA backends launch on a stand-in."""
    driver = Driver()

    def load(program, name, signature, *, threads, shared_bytes=0, programmatic=False):
        layout = Layout.of(signature)
        number = 1000 + len(driver.layouts)
        driver.layouts[number] = layout
        return launch.Kernel(name, None, number, layout, threads, shared_bytes, programmatic)

    for module in (prepass, attention):
        monkeypatch.setattr(module, "load", load)
    _install_triton(monkeypatch, driver)
    monkeypatch.setattr(
        attention, "tensor_map", lambda pointer, *form: pointer.to_bytes(8, "little") * 16
    )
    monkeypatch.setattr(attention, "_processors", lambda device: 132)
    monkeypatch.setattr(launch.Kernel, "_prepare", lambda kernel, device: None)
    monkeypatch.setattr(chain, "enter", lambda device: None)
    monkeypatch.setattr(chain, "launcher", lambda: driver)
    monkeypatch.setattr(prepared, "_PREPARED", type(prepared._PREPARED)(prepared.MOST_KINDS))
    for name in ("empty", "take", "give"):
        monkeypatch.setattr(memory, name, getattr(driver, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    prepass.plan_of.cache_clear()
    attention.launch_of.cache_clear()
    return driver


_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def _kind(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return _POINTERS[arg.dtype]
    if isinstance(arg, int | float):
        return "i32" if isinstance(arg, int) else "fp32"
    if arg is None:
        return None
    block = ", ".join(map(str, arg.block_shape))
    return f"tensordesc<{_POINTERS[arg.base.dtype][1:]}[{block}]>"


def _install_triton(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Triton's kernels compiled for sm_90, and not launched at their first call."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton_compile import build

    from sagepatch.backends.triton import attention as triton_attention
    from sagepatch.backends.triton import exact, launching
    from sagepatch.backends.triton import prepass as triton_prepass

    def launch(kernel, programs, args, constants, recording, **options):
        names = kernel.arg_names
        types = {name: _kind(arg) for name, arg in zip(names, args, strict=False)}
        made = build(kernel, types, constants, 90, **options)
        function = 1000 + len(driver.layouts)
        compiled = Compiled(made.src, made.metadata, made.asm, function)
        recording.launches.append((compiled, programs, [*args, *constants.values()]))
        driver.layouts[function] = Layout.of("")

    def links_of(*args):
        found = genuine(*args)
        for link in found[0]:
            driver.layouts[link.function] = link.layout
        return found

    genuine = launching.links_of
    for module in (triton_attention, triton_prepass, exact):
        monkeypatch.setattr(module, "launch", launch)
    for module in (triton_attention, exact):
        monkeypatch.setattr(module, "links_of", links_of)
    monkeypatch.setattr(triton_attention, "arch_of", lambda device: 90)
    encoded = lambda pointer, *form: pointer.to_bytes(8, "little") * 16  # noqa: E731
    monkeypatch.setattr(launching, "tensor_map", encoded)
