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
    """A sentence saying why the kernels can run on no GPU here; None when they can on one, or where
    their records refuse it anyway. A call may be of any GPU, whichever is the current one: that the
    compiler does not know that one is found by its known-answer check.
    """
    if not torch.cuda.is_available():
        return missing(TARGETS[OLDEST])
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    count = torch.cuda.device_count()
    why = None
    for number in sorted(range(count), key=lambda number: number != current):
        arch = arch_of(torch.device("cuda", number))
        found = missing(TARGETS.get(arch or OLDEST, TARGETS[OLDEST]))
        if found is None:
            return None
        why = why or found
    return why
