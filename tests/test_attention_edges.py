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
        ({"softcap": math.inf}, "softcap=inf"),
        ({"window": 2.5}, "window=2.5"),
        ({"window": 1 << 63}, "64 bits"),
        ({"causal_offset": 0.5, "is_causal": True}, "causal_offset=0.5"),
    ],
    ids=["softcap", "window", "window too large", "offset"],
)
def test_options_that_no_kernel_can_honour_are_refused(options, says: str) -> None:
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match=says):
        sagepatch.attention(q, k, v, **options)


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
