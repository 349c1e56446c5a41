"""Exact attention with its log-sum-exp, as a ring over several processes needs it: torch's fused
kernel where that serves, plain torch elsewhere, both against FP64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from sagepatch.backends import sdpa
from sagepatch.numerics.exact import exact
from sagepatch.numerics.recipe import EXACT
from sagepatch.spec import Call

DEVICES = [
    ("cpu", torch.float32),
    *(
        pytest.param(
            *("cuda", dtype),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
]
# Errors relative to FP64: of sums in FP32, and of an output rounded to 16 bits with P.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def a_call(device="cpu", dtype=torch.float32, Sq=77, Skv=130, D=40, Hkv=3, **options) -> Call:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, Sq, 3, D, generator=g).to(device, dtype).transpose(1, 2)
    k, v = torch.randn(2, 2, Hkv, Skv, D, generator=g).to(device, dtype).unbind(0)
    return Call(q, k, v, 1 / math.sqrt(D), return_lse=True, **options)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("bshd_out", [False, True])
@pytest.mark.parametrize("D", [40, 64, 128])
def test_output_and_lse_are_those_of_fp64(device, dtype, bshd_out: bool, D: int) -> None:
    call = a_call(device, dtype, D=D, bshd_out=bshd_out)
    assert sdpa._flash_serves(call)
    out, lse = sdpa.run(call, EXACT)
    right, right_lse = exact(call, torch.float64)
    assert lse is not None
    assert ((out.double() - right).norm() / right.norm()).item() < BOUNDS[dtype]
    assert (lse.double() - right_lse).abs().max().item() < 1e-5
    for made, promised in ((out, call.empty_out()), (lse, call.empty_lse())):
        assert (made.dtype, made.shape) == (promised.dtype, promised.shape)
        assert made.stride() == promised.stride()


OTHERS = {
    "mask": {"attn_mask": torch.arange(130).view(1, 1, 1, -1) < 100},
    "causal": {"causal_offset": 53},
    "soft cap": {"softcap": 5.0},
    "sinks": {"sinks": torch.ones(3)},
    "shared heads": {"Hkv": 1},
    "no keys": {"Skv": 0},
    "FP64": {"dtype": torch.float64},
    "BF16 on a CPU": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_plain_torch(name: str) -> None:
    call = a_call(**OTHERS[name])
    assert not sdpa._flash_serves(call)
    _, lse = sdpa.run(call, EXACT)
    right = exact(call, torch.float64)[1]
    assert lse is not None
    torch.testing.assert_close(lse.double(), right.double(), atol=1e-4, rtol=1e-4)


def test_derivatives_are_plain_torch() -> None:
    call = a_call()
    call.q.requires_grad_()
    assert not sdpa._flash_serves(call)
    with torch.no_grad():
        assert sdpa._flash_serves(call)
    call = a_call()
    with forward_ad.dual_level():
        dual = replace(call, q=forward_ad.make_dual(call.q, torch.ones_like(call.q)))
        assert not sdpa._flash_serves(dual)
