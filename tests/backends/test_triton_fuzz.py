"""Random calls on the Triton kernels: shapes, strides, masks, dtypes and recipes by Hypothesis.

SAGEPATCH_FUZZ sets how many; a GPU takes thousands.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_support import DEVICE, DTYPE, ON_GPU, check, needs_kernels

pytestmark = needs_kernels

from sagepatch.numerics.recipe import RECIPES  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

EXAMPLES = int(os.environ.get("SAGEPATCH_FUZZ", "12"))
LONGEST = 700 if ON_GPU else 140
NAMES = ["sage2_8", "sage2_8b_k128", "sage1_b", "sage2_4"]
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if ON_GPU else [])]


def _tensor(gen, shape, order, dtype):
    """A random tensor of `shape` with the axes of its memory in `order`."""
    memory = torch.randn([shape[axis] for axis in order], generator=gen)
    back = [order.index(axis) for axis in range(4)]
    return memory.permute(back).to(DEVICE, dtype)


@st.composite
def calls(draw):
    Hkv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    B = draw(st.integers(1, 3))
    # The records refuse a single key.
    Sq, Skv = draw(st.integers(1, LONGEST)), draw(st.integers(2, LONGEST))
    D, Dv = draw(st.sampled_from([(64, 64), (40, 40), (128, 128), (80, 80), (64, 32)]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 3, 2)]))
    q = _tensor(gen, (B, Hkv * group, Sq, D), order, dtype)
    k = _tensor(gen, (B, Hkv, Skv, D), order, dtype) + draw(st.sampled_from([0, 3]))
    v = _tensor(gen, (B, Hkv, Skv, Dv), order, dtype)
    kind = draw(st.sampled_from(["none", "key", "bool", "bias", "causal", "window", "causal+key"]))
    mask = offset = window = None
    if "key" in kind:
        mask = torch.rand((B, 1, 1, Skv), generator=gen).to(DEVICE) < draw(
            st.sampled_from([0.02, 0.9])
        )
        if draw(st.booleans()):
            mask = (torch.arange(Skv, device=DEVICE) < draw(st.integers(0, Skv))).view(1, 1, 1, -1)
    if kind in ("bool", "bias"):
        shape = draw(st.sampled_from([(Sq, Skv), (1, Hkv * group, Sq, Skv), (B, 1, Sq, Skv)]))
        mask = torch.rand(shape, generator=gen).to(DEVICE) < 0.8
        if kind == "bias":
            bias = torch.randn(shape, generator=gen).to(DEVICE, dtype)
            mask = bias.masked_fill(~mask, float("-inf"))
    if "causal" in kind or kind == "window":
        offset = draw(st.integers(-20, max(1, Skv - Sq + 10)) if Skv > Sq else st.integers(-20, 20))
        window = draw(st.integers(1, 150)) if kind == "window" else None
    sinks = torch.randn(Hkv * group, generator=gen).to(DEVICE) if draw(st.booleans()) else None
    return Call(q, k, v, D**-0.5, mask, offset, window, None, sinks, bshd_out=draw(st.booleans()))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not ON_GPU,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(call=calls(), name=st.sampled_from(NAMES))
@pytest.mark.parametrize("lane", range(int(os.environ.get("SAGEPATCH_FUZZ_LANES", "1"))))
def test_any_call_equals_its_emulator(lane, call, name):
    check(call, RECIPES[name])


assert DTYPE in DTYPES
