"""What the mma.sync kernels need of a machine: a compiler, a driver, a GPU that they serve."""

from __future__ import annotations

import torch

from sagepatch.backends.cuda.build import TARGETS
from sagepatch.backends.cuda.launch import missing
from sagepatch.errors import InvalidArgument
from sagepatch.spec import arch_of

# What is asked of the compiler where no GPU is: every NVRTC that serves has it.
OLDEST = 80


def target_of(device: torch.device) -> str:
    """What is compiled for a device."""
    arch = arch_of(device)
    if arch not in TARGETS:
        raise InvalidArgument(f"the mma.sync kernels are not made for sm_{arch}")
    return TARGETS[arch]


def missing_here() -> str | None:
    """A sentence saying why the kernels cannot run on the GPU here; None when they can, or where
    their records refuse it anyway.
    """
    arch = arch_of(torch.device("cuda")) if torch.cuda.is_available() else None
    return missing(TARGETS.get(arch or OLDEST, TARGETS[OLDEST]))
