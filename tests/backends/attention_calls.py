"""Random calls for tests of GPU kernels, and memory poisoned before they run. Knows no kernel."""

from __future__ import annotations

from typing import Any

import torch

from sagepatch.spec import Call


def random_call(
    device: torch.device,
    shape: tuple[int, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Call:
    """A call of shape (B, Hq, Hkv, Sq, Skv, D[, Dv]); keys have an offset of each channel."""
    B, Hq, Hkv, Sq, Skv, D = shape[:6]
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, Sq, D, generator=gen)
    k = torch.randn(B, Hkv, Skv, D, generator=gen) + 2 * torch.randn(1, Hkv, 1, D, generator=gen)
    v = torch.randn(B, Hkv, Skv, shape[-1], generator=gen)
    options.setdefault("scale", D**-0.5)
    return Call(*(t.to(device, dtype) for t in (q, k, v)), **options)


def poison(call: Call) -> None:
    """Leave NaN in the memory that the allocator of the call's GPU hands out next: where an output
    and a log-sum-exp of this call would lie, and in blocks of both of its pools, as it keeps those
    of up to a megabyte apart.
    """
    size = 4 * (call.q.numel() + call.k.numel() + call.v.numel()) + (1 << 19)
    # All at once, the output first, as a kernel takes it.
    held = [call.empty_out(), call.empty_lse()]
    held += [call.q.new_empty(n, dtype=torch.float16) for n in (*[1 << 19] * 8, size)]
    for tensor in held:
        tensor.fill_(float("nan"))
