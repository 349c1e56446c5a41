"""Device memory for one call, as cheaply as this torch gives it: `torch.empty` costs the host more
than a launch. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Where torch lacks its own raw functions: the tensors whose addresses were taken and not given back
# yet.
_TAKEN: dict[int, Tensor] = {}


def empty_of_torch(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `empty` does, by torch's documented functions."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def take_of_torch(size: int, stream: int) -> int:
    """What `take` does, by torch's documented functions, which know the current stream: `stream` is
    that one.
    """
    if not size:
        return 0
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    _TAKEN[held.data_ptr()] = held
    return held.data_ptr()


def give_of_torch(address: int) -> None:
    """What `give` does after `take_of_torch`."""
    if address:
        del _TAKEN[address]


_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_CACHED = hasattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete")

# (shape, strides, dtype): an unwritten tensor on the current device, for its current stream. Shape
# and strides must be tuples: torch.Size is none there. Code that torch compiled takes its buffers
# from there.
empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    _GUARDS, "_empty_strided_cuda", empty_of_torch
)
# (bytes, stream): the address of scratch memory on the current device, for work on its current
# stream, by its handle; 0 where no bytes are asked for. torch.cuda.caching_allocator_alloc without
# its checks.
take: Callable[[int, int], int] = (
    torch._C._cuda_cudaCachingAllocator_raw_alloc if _CACHED else take_of_torch
)
# (address): gives back what `take` gave, once the work is launched: whoever gets it next on that
# stream comes after it.
give: Callable[[int], None] = (
    torch._C._cuda_cudaCachingAllocator_raw_delete if _CACHED else give_of_torch
)
