"""What sagepatch keeps between calls lives in no memory pool that its caller allocates from: CUDA
graph trees warm up and record in a pool of their own, and refuse to while an unknown tensor lives
there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.placed import EXACT, HOPPER, KERNEL, built, run
from torch import Tensor

import sagepatch
from sagepatch.backends import unusable
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ops import run_layer
from sagepatch.spec import Call


def live_bytes(pool: torch.cuda.MemPool) -> list[int]:
    """Sizes of what is still allocated in a pool, but for the workspaces of cuBLAS: torch keeps
    them where its first product ran, and gives them back before it records a graph.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return [block["size"] for block in blocks if block["state"] == "active_allocated"]


def layer(kernel: str) -> PatchedLayer:
    made = PatchedLayer("site", "self", Policy(), Request("exact"), unusable)
    made.run_with(Request(kernel), "asked for")
    return made


def call(length: int, kind: str) -> Call:
    q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    mask = None
    if kind == "key mask":
        mask = (torch.arange(length, device="cuda") < length - 9).expand(2, 1, 1, length)
    return Call(
        q, k, v, 0.125, mask, 0 if kind == "causal" else None, return_lse=kind == "log-sum-exp"
    )


KINDS = ("plain", "causal", "key mask", "log-sum-exp")


@pytest.mark.parametrize("kernel", [KERNEL, HOPPER, EXACT])
def test_a_layer_s_first_calls_leave_nothing_in_the_pool_of_the_moment(kernel: str) -> None:
    pool = torch.cuda.MemPool()
    kept = []
    # Lengths that no other test has: each call is the first of its kind.
    for length, kind in enumerate(KINDS, 331):
        one = layer(kernel)
        kept.append(one)
        with torch.cuda.use_mem_pool(pool):
            # Past the first time that the host asks the guard.
            for _ in range(3):
                given = call(length, kind)
                out = run_layer(one, given)
                del given, out
        assert set(one.record.by_variant) == {kernel}
    seen: Tensor | None = None
    with torch.cuda.use_mem_pool(pool):
        seen = torch.zeros(2, device="cuda")
    # The pool is one that would tell.
    assert len(live_bytes(pool)) == 1
    del seen
    assert live_bytes(pool) == []


def test_a_layer_that_measures_leaves_nothing_in_it() -> None:
    model, inputs = built("stack")
    pool = torch.cuda.MemPool()
    with sagepatch.apply(model) as patch:
        with torch.cuda.use_mem_pool(pool):
            for _ in range(2):
                run(model, inputs)
        assert all(len(row.candidates) >= 4 for row in patch.calibration().layers)
        assert live_bytes(pool) == []


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_guard_serves_in_and_out_of_inference_mode(
    first: Callable[[], Any],
) -> None:
    one = layer(KERNEL)
    with first():
        for _ in range(2):
            run_layer(one, call(200, "plain"))
    # The host asks at calls 1, 2, 4, 8.
    with torch.no_grad():
        for _ in range(8):
            torch.cuda.synchronize()
            run_layer(one, call(200, "plain"))
    one.ask_guards()
    assert one.record.by_variant == {KERNEL: 10}
    assert one.demoted is None
