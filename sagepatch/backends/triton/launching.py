"""Launches of Triton kernels, remembered: a call like an earlier one replays its launches with new
pointers, which costs the host a fraction. Knows no arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Scratch tensors start at multiples of this, as torch's allocator aligns its blocks.
ALIGNMENT = 512


@dataclass(slots=True)
class Recording:
    """The launches of one call, in order: compiled kernel, programs, every argument."""

    launches: list[tuple[Any, int, list[Any]]] = field(default_factory=list)


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
    recording: Recording | None,
    **options: Any,
) -> None:
    """Launch `kernel` on a grid of one axis; `constants` are its last parameters, in order."""
    compiled = kernel[(programs,)](*args, **constants, **options)
    if recording is not None and compiled is not None:
        recording.launches.append((compiled, programs, [*args, *constants.values()]))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A place in the scratch memory of a replay, as far as a descriptor asks."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


# Argument number, and what to fill in: a tensor of the call by name, or an offset into the scratch
# memory.
_Slot = tuple[int, int | str]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a call of known shape does again: each launch with its pointers filled in anew."""

    steps: tuple[tuple[Callable[..., None], tuple[Any, ...], tuple[_Slot, ...]], ...]
    scratch_bytes: int

    def run(self, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
        """Launch on the current stream; `tensors` are those of the call, by the names given to
        `replay_of`.
        """
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        base = scratch.data_ptr()
        for runner, template, slots in self.steps:
            args = list(template)
            for position, source in slots:
                if isinstance(source, str):
                    args[position] = tensors[source]
                elif args[position] is None:
                    args[position] = base + source
                else:
                    args[position] = _moved(args[position], base + source)
            runner(*args)


def _moved(descriptor: TensorDescriptor, pointer: int) -> TensorDescriptor:
    """`descriptor` over the same matrix at another place."""
    moved = copy.copy(descriptor)
    moved.base = _Scratch(pointer, descriptor.base.dtype)
    return moved


def replay_of(recording: Recording, tensors: dict[str, Tensor | None]) -> Replay | None:
    """Turn a recording into a replay; tensors that are not among `tensors` are scratch."""
    if not recording.launches:
        return None
    names = {id(tensor): name for name, tensor in tensors.items() if tensor is not None}
    offsets: dict[int, int] = {}
    total = 0
    steps = []

    def place(tensor: Tensor) -> int:
        # By address: a descriptor holds a view of the tensor that another launch wrote.
        nonlocal total
        pointer = tensor.data_ptr()
        if pointer not in offsets:
            offsets[pointer] = total
            size = tensor.numel() * tensor.element_size()
            total += -(-size // ALIGNMENT) * ALIGNMENT
        return offsets[pointer]

    for compiled, programs, args in recording.launches:
        slots: list[tuple[int, int | str]] = []
        template = list(args)
        for position, arg in enumerate(args):
            if isinstance(arg, TensorDescriptor):
                slots.append((position, place(arg.base)))
                # Only its measures are kept, not the memory.
                template[position] = _moved(arg, 0)
            elif isinstance(arg, Tensor):
                template[position] = None
                name = names.get(id(arg))
                slots.append((position, place(arg) if name is None else name))
        steps.append((compiled[(programs, 1, 1)], tuple(template), tuple(slots)))
    return Replay(tuple(steps), total)
