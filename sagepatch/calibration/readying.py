"""Kernels compiled and checked before they are measured, several at once: compilers let other
threads run. Knows neither errors nor times.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sagepatch.backends import load
from sagepatch.backends.guard import DeviceGuard, available
from sagepatch.backends.selfcheck import failure
from sagepatch.errors import KernelUnavailable
from sagepatch.spec import Call
from sagepatch.variant import Variant

# What a kernel holds of a call's own bytes: its codes, its output and what it computes between.
CALL_SHARE = 2


def make_ready(
    variants: Sequence[Variant], call: Call, workers: int | None = None, guarded: bool = True
) -> None:
    """Run the known-answer check of each kernel and then the kernel once on `call`, and once as it
    is guarded on the device, so that what is compiled on the way is there. As many at once as cores
    and the memory left allow, or `workers`; off a GPU nothing is compiled, and nothing is done.

    A kernel that cannot serve stays one: whoever uses it next is told. Other exceptions propagate.
    """
    many = _workers(call) if workers is None else workers
    if not many or not variants:
        return
    device = call.q.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(min(many, len(variants))) as pool:
        jobs = [pool.submit(_ready, variant, call, stream, guarded) for variant in variants]
    for variant, job in zip(variants, jobs, strict=True):
        error = job.exception()
        if error is not None:
            error.add_note(f"raised by {variant.name}, made ready for {call.spec()}")
            raise error


def _ready(variant: Variant, call: Call, stream: torch.cuda.Stream | None, guarded: bool) -> None:
    # Threads start with torch's defaults: another device and stream, gradients on.
    with torch.inference_mode(), torch.cuda.stream(stream):
        if stream is not None:
            # Binds the context of the device to this thread, which our own launches need.
            torch.zeros(1, device=call.q.device)
        if failure(variant) is not None:
            return
        try:
            load(variant.entry)(call, variant.recipe)
            if guarded and stream is not None and available():
                # Other machine code than without a guard, and the exact kernel behind it.
                DeviceGuard(call.q.device).run(variant, call)
        except (KernelUnavailable, torch.OutOfMemoryError):
            return


def _workers(call: Call) -> int:
    """How many kernels may run at once; 0 where none compiles anything."""
    if call.q.device.type != "cuda":
        return 0
    tensors = (call.q, call.k, call.v, call.q)
    needed = CALL_SHARE * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free, _ = torch.cuda.mem_get_info(call.q.device)
    return max(1, min(os.cpu_count() or 1, free // max(1, needed)))
