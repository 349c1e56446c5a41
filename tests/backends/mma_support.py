"""What the tests of the mma.sync kernels share: calls, the kernel run on a GPU that has these
instructions or else on the CPU, and how far it may be from the emulator.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import cuda_on_cpu
import pytest
import torch
from attention_calls import poison, random_call
from torch import Tensor

from sagepatch.backends.catalogue import CUDA_MMA
from sagepatch.backends.cuda import prepass as cuda_prepass
from sagepatch.backends.cuda.build import TARGETS
from sagepatch.backends.cuda_mma import attention, masks, prepass
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call, arch_of

ON_GPU = torch.cuda.is_available() and arch_of(torch.device("cuda", 0)) in TARGETS
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
RUNS = ON_GPU or cuda_on_cpu.available()
WHY_NOT = "needs a GPU from sm_80 on, or g++ 12"
# Without a GPU the source is compiled as C++; the GPU's name decides nothing there.
CPU_TARGET = "sm_89"
# Of the kernel beside its emulator, before the output is rounded: exp2 of the hardware moves a few
# codes of P to their neighbours, and FP16 sums round after 16 keys where a GPU emulates E4M3. A
# mean of K summed in another order moves a code of K now and then: few keys feel it most.
REL_L1 = {"e4m3": 2e-3, "fp16": 1e-3, "int8": 2e-3}
LSE_ABS, LSE_REL = 1e-2, 3e-7

make = partial(random_call, DEVICE, dtype=torch.float16)


@pytest.fixture
def kernels_here(monkeypatch):
    """Without a GPU the source runs on the CPU."""
    if not ON_GPU:
        for module in (cuda_prepass, prepass, attention, masks):
            monkeypatch.setattr(module, "load", cuda_on_cpu.load)
    cuda_prepass.plan_of.cache_clear()
    yield
    cuda_prepass.plan_of.cache_clear()


def each(quick: list[str], rest: bool = False) -> list:
    """Every recipe on a GPU, those beside `quick` in the long run; a CPU takes the rest only where
    asked to.
    """
    names = [variant.recipe.name for variant in CUDA_MMA] if ON_GPU or rest else quick
    marks = {name: () if name in quick else pytest.mark.slow for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """The kernel on poisoned memory, on the GPU here or on the CPU."""
    if ON_GPU:
        poison(call)
        return attention.run(call, recipe)
    out = call.empty_out().fill_(float("nan"))
    lse = call.empty_lse().fill_(float("nan")) if call.return_lse else None
    attention.launch(call, recipe, out, lse, CPU_TARGET)
    return out, lse


def check(call: Call, recipe: Recipe) -> Tensor:
    """Hold the kernel's output and log-sum-exp to the emulator's."""
    out, lse = run(replace(call, return_lse=True), recipe)
    expected, expected_lse = emulate(call, recipe)
    assert out.dtype == call.v.dtype
    assert out.shape == expected.shape
    worst = compare(out.float(), expected).worst
    assert worst.finite
    assert worst.rel_l1 <= REL_L1[recipe.pv] + torch.finfo(out.dtype).eps, worst
    assert lse is not None
    bound = LSE_ABS + LSE_REL * expected_lse.abs()
    same = (lse == expected_lse) | ((lse - expected_lse).abs() < bound)
    assert bool(same.all()), (lse - expected_lse).abs().max()
    return out
