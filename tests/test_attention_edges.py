"""Inputs of `sagepatch.attention` at the edge of what it takes: masks of any dtype and rank, FP64,
lengths that do not rise, tensors that are no tensors of numbers.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sagepatch
from sagepatch.errors import (
    InvalidArgument,
)
from sagepatch.numerics.attention import emulate

FAST = "emulated.sage2_8"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def qkv(S: int = 20) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 4, S, 16, generator=generator).unbind(0)


@pytest.mark.parametrize("shape", [(2, 1, 20, 20), (1, 1, 1, 20), (20, 20), (20,)], ids=str)
@pytest.mark.parametrize("mask_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_additive_masks_of_any_dtype_mean_what_they_say(dtype, mask_dtype, shape) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(mask_dtype)
    mask[..., 3], mask[..., 5] = torch.finfo(mask_dtype).min, -torch.inf
    whole = mask.double() if mask.dim() > 1 else mask[None].double()
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=whole)
    out = sagepatch.attention(q, k, v, attn_mask=mask, variant="exact")
    assert (out.double() - expected).abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_the_lowest_fp32_numbers_is_the_mean_of_v(dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    mask = torch.zeros(2, 1, 20, 20)
    mask[:, :, 3], mask[:, :, 5] = torch.finfo(torch.float32).min, -torch.inf
    for variant, slack in (("exact", 4e-3), (FAST, 2e-2)):
        out = sagepatch.attention(q, k, v, attn_mask=mask, variant=variant).float()
        assert (out[:, :, 3] - v.float().mean(2)).abs().max() < slack
        assert not out[:, :, 5].any()


@pytest.mark.parametrize("shape", [(), (20,)], ids=["0-D", "1-D"])
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_masks_of_fewer_axes_broadcast(variant: str, shape) -> None:
    q, k, v = qkv()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3
    whole = mask.expand(2, 4, 20, 20)
    out = sagepatch.attention(q, k, v, attn_mask=mask, variant=variant)
    same = sagepatch.attention(q, k, v, attn_mask=whole, variant=variant)
    assert (out - same).abs().max() < 1e-5


@pytest.mark.parametrize(
    "options",
    [{"return_lse": True}, {"softcap": 1e12}, {"sinks": torch.full((4,), -torch.inf)}],
    ids=["lse", "softcap", "sinks"],
)
def test_exact_attention_in_fp64_is_fp64_with_every_option(options) -> None:
    q, k, v = (t.double() for t in qkv())
    given = sagepatch.attention(q, k, v, variant="exact", **options)
    out = given[0] if isinstance(given, tuple) else given
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"softcap": math.inf}, "softcap is inf"),
        ({"window": 2.5}, "window is 2.5"),
        ({"window": 1 << 63}, "64 bits"),
        ({"causal_offset": 0.5, "is_causal": True}, "causal_offset is 0.5"),
        # Once wrong: numbers that FP32 does not hold gave NaN, or an error of Python's own.
        *(({"softcap": value}, "softcap is .* FP32") for value in (1e300, 3e38, 1e-50, 0, -1.0)),
        *(({"scale": value}, "scale is .* FP32") for value in (1e300, -1e300, 1e-300, 10**400)),
        ({"scale": 10**5000}, "scale is a whole number of 16610 bits"),
        ({"softcap": 10**5000}, "softcap is a whole number of 16610 bits"),
        ({"window": 10**5000}, "window is a whole number of 16610 bits"),
        # Once wrong: they passed for 1, and subtracting them was torch's error.
        ({"window": True}, "window is True"),
        ({"causal_offset": True, "is_causal": True}, "causal_offset is True"),
        # Once wrong: the imaginary part was dropped.
        ({"sinks": torch.ones(4) * 1j}, "sinks has dtype torch.complex64"),
        ({"sinks": torch.ones(4) > 0}, "sinks has dtype torch.bool"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
@pytest.mark.parametrize("variant", ["exact", FAST])
def test_options_that_no_kernel_can_honour_are_refused(variant: str, options, says: str) -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match=says):
        sagepatch.attention(q, k, v, variant=variant, **options)


@pytest.mark.parametrize("variant", ["exact", FAST])
@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("value", [2.0**-100, 2.0**100])
def test_the_least_and_the_largest_options_give_numbers(variant: str, option: str, value) -> None:
    q, k, v = qkv()
    for causal in (False, True):
        out = sagepatch.attention(q, k, v, variant=variant, is_causal=causal, **{option: value})
        assert out.isfinite().all()


def test_lengths_that_differ_over_a_vmap_are_refused() -> None:
    x = qkv()[0][:1]

    def packed(ends: torch.Tensor) -> torch.Tensor:
        return sagepatch.attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_kv=ends, variant=FAST)

    with pytest.raises(InvalidArgument, match="cu_seqlens_q cannot differ over a vmap"):
        torch.vmap(packed)(torch.tensor([[0, 5, 20], [0, 6, 20]]))
    ends = torch.tensor([0, 5, 20])
    assert torch.equal(torch.vmap(lambda y: packed(ends) + y)(torch.zeros(2))[1], packed(ends))


def test_tensors_that_hold_no_attention_call_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match="heads of size 0"):
        sagepatch.attention(q[..., :0], k[..., :0], v)
    with pytest.raises(InvalidArgument, match="0 heads"):
        sagepatch.attention(q[:, :0], k, v, variant=FAST)
    with pytest.raises(InvalidArgument, match="sparse_coo"):
        sagepatch.attention(q.to_sparse(), k, v)
    with pytest.raises(InvalidArgument, match="attn_mask is of layout"):
        sagepatch.attention(q, k, v, attn_mask=torch.eye(20).to_sparse())
    with pytest.raises(InvalidArgument, match="sinks is of layout"):
        sagepatch.attention(q, k, v, sinks=torch.ones(4).to_sparse())


def test_packed_calls_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        q = mode.from_tensor(qkv()[0][:1])
        ends = mode.from_tensor(torch.tensor([0, 5, 20]))
        out = sagepatch.attention(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, variant=FAST)
    assert out.shape == q.shape


def test_a_tangent_is_refused_not_lost() -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match="no tangent"), torch.no_grad():
        torch.func.jvp(lambda x: sagepatch.attention(x, k, v, variant=FAST), (q,), (q,))


def test_wrong_cumulative_lengths_are_refused_in_compiled_code_too() -> None:
    q = qkv()[0][:1]

    def packed(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return sagepatch.attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_kv=ends, variant=FAST)

    wrong = torch.tensor([0, 25, 20])
    for run in (packed, torch.compile(packed, backend="eager", fullgraph=True)):
        assert run(q, torch.tensor([0, 5, 20])).shape == q.shape
        with pytest.raises(InvalidArgument, match="must rise from 0"):
            run(q, wrong)
    with pytest.raises(InvalidArgument, match="must rise from 0"):
        sagepatch.attention(
            q.clone().requires_grad_(), q, q, cu_seqlens_q=wrong, cu_seqlens_kv=wrong
        )


def test_kernels_get_sinks_and_lengths_without_gaps(monkeypatch) -> None:
    seen = []

    def kernel(one, recipe):
        seen.append(one)
        return emulate(one, recipe)

    monkeypatch.setattr("sagepatch.backends.emulated.emulate", kernel)
    q = qkv()[0][:1]
    ends = torch.tensor([0, 9, 5, 9, 20, 9])[::2]
    gaps = {"sinks": torch.randn(8)[::2], "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    sagepatch.attention(q, q, q, variant=FAST, **gaps)
    assert seen[0].sinks.is_contiguous()
    assert seen[0].cu_seqlens_q.is_contiguous()
    assert seen[0].cu_seqlens_kv.is_contiguous()


@pytest.mark.parametrize("term", ["q", "k", "v", "attn_mask", "sinks"])
def test_lazily_negative_tensors_reach_kernels_as_what_they_mean(monkeypatch, term: str) -> None:
    """Such as the imaginary part of a conjugate: memory holds the other sign."""
    seen = []

    def kernel(one, recipe):
        seen.append(one)
        return emulate(one, recipe)

    monkeypatch.setattr("sagepatch.backends.emulated.emulate", kernel)
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "attn_mask": torch.randn(20, 20), "sinks": torch.randn(4)}
    expected = sagepatch.attention(**given, variant=FAST)
    negative = torch._neg_view(-given[term])
    assert negative.is_neg()
    found = sagepatch.attention(**{**given, term: negative}, variant=FAST)
    assert torch.equal(found, expected)
    assert not getattr(seen[-1], term).is_neg()
