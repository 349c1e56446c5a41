"""Launches of Triton kernels, remembered: a call like an earlier one replays its launches with new
pointers, which costs the host a fraction. Knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
class Replay:
    """What a call of known shape does again: each launch with its pointers filled in anew."""

    steps: tuple[
        tuple[Callable[..., None], tuple[Any, ...], tuple[tuple[int, int | str], ...]], ...
    ]
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
                args[position] = tensors[source] if isinstance(source, str) else base + source
            runner(*args)


def replay_of(recording: Recording, tensors: dict[str, Tensor | None]) -> Replay | None:
    """Turn a recording into a replay; tensors that are not among `tensors` are scratch."""
    if not recording.launches:
        return None
    names = {id(tensor): name for name, tensor in tensors.items() if tensor is not None}
    offsets: dict[int, int] = {}
    total = 0
    steps = []
    for compiled, programs, args in recording.launches:
        slots: list[tuple[int, int | str]] = []
        template = list(args)
        for position, arg in enumerate(args):
            if not isinstance(arg, Tensor):
                continue
            template[position] = None
            if id(arg) in names:
                slots.append((position, names[id(arg)]))
                continue
            if id(arg) not in offsets:
                offsets[id(arg)] = total
                size = arg.numel() * arg.element_size()
                total += -(-size // ALIGNMENT) * ALIGNMENT
            slots.append((position, offsets[id(arg)]))
        steps.append((compiled[(programs, 1, 1)], tuple(template), tuple(slots)))
    return Replay(tuple(steps), total)
