"""Exact attention against SDPA and against itself: options, gradients, FP64, nothing quantised."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics_support import normal

from sagepatch.numerics.attention import exact
from sagepatch.spec import Call

KEEP = torch.rand(2, 4, 33, 50, generator=torch.Generator().manual_seed(2)) > 0.4
KEEP[..., 0] = True
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal_offset": 0}, {"is_causal": True}),
    "bool mask": ({"attn_mask": KEEP}, {"attn_mask": KEEP}),
    "bias": ({"attn_mask": KEEP.float()}, {"attn_mask": KEEP.float()}),
    "bottom right": (
        {"causal_offset": 17},
        {"attn_mask": torch.arange(50)[None, :] <= torch.arange(33)[:, None] + 17},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_sdpa(form: str, dtype: torch.dtype) -> None:
    ours, theirs = FORMS[form]
    call = normal(2, 4, 2, 33, 50, 16, 24, scale=0.3, **ours)
    call = replace(call, q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
    theirs = {
        n: m.to(dtype) if n == "attn_mask" and m.is_floating_point() else m
        for n, m in theirs.items()
    }
    want = F.scaled_dot_product_attention(
        call.q, call.k, call.v, scale=0.3, enable_gqa=True, **theirs
    )
    out, lse = exact(call, dtype)
    assert (out.dtype, lse.dtype) == (dtype, dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(out, want, atol=tolerance, rtol=10 * tolerance)


# case 9
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"sinks": torch.tensor([1.0, -2.0, 0.0, 5.0])}, {"attn_mask": KEEP}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_log_sum_exp_is_natural_and_by_head(options: dict[str, Any]) -> None:
    call = normal(2, 4, 2, 33, 50, 16, scale=0.7, **options)
    scores = call.q.double() @ call.k.double().repeat_interleave(2, 1).mT * 0.7
    if "softcap" in options:
        scores = 2.0 * torch.tanh(scores / 2.0)
    if "attn_mask" in options:
        scores = scores.masked_fill(~KEEP, -math.inf)
    if "sinks" in options:
        sinks = options["sinks"].double().view(1, 4, 1, 1).expand(2, 4, 33, 1)
        scores = torch.cat([scores, sinks], 3)
    weights = torch.softmax(scores, 3)[..., :50]
    out, lse = exact(call)
    assert lse.shape == (2, 4, 33)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, 3), atol=1e-5, rtol=0)
    want = weights @ call.v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tiles", [1, 5], ids=["one tile", "many tiles"])
def test_gradients_are_those_of_fp64_autograd(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every differentiable tensor, with rows that see nothing among the others."""
    monkeypatch.setattr("sagepatch.numerics.exact.SCORE_BUDGET", 2 * 2 * 9 * -(-7 // tiles))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=g).double() for n in (7, 9, 9))
    bias = torch.randn(7, 9, generator=g).double()
    bias[2] = -math.inf
    bias[4, 3:] = torch.finfo(torch.float64).min
    sinks = torch.randn(2, generator=g).double()
    inputs = [t.requires_grad_() for t in (q, k, v, bias, sinks)]

    def run(*t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = Call(*t[:3], 0.5, attn_mask=t[3], softcap=3.0, sinks=t[4])
        return exact(call, torch.float64)

    loss = sum(part.square().sum() for part in run(*inputs))
    grads = torch.autograd.grad(loss, inputs)
    assert all(grad.isfinite().all() for grad in grads)
    hidden = torch.zeros(7, 9, dtype=torch.bool)
    hidden[2], hidden[4, 3:] = True, True
    assert not grads[3][hidden].any()
    steps = {0: (0, 1, 3, 2), 1: (1, 0, 2, 1), 2: (0, 0, 1, 3), 3: (3, 1), 4: (1,)}
    for index, at in steps.items():
        moved = []
        for step in (1e-6, -1e-6):
            changed = [t.detach().clone() for t in inputs]
            changed[index][at] += step
            moved.append(sum(part.square().sum() for part in run(*changed)))
        slope = (moved[0] - moved[1]) / 2e-6
        assert grads[index][at].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-7)


def test_gradients_of_rows_that_see_nothing_are_zero() -> None:
    call = normal(1, 1, 1, 6, 5, 4, causal_offset=-3)
    q = call.q.requires_grad_()
    out, _ = exact(replace(call, q=q))
    out.sum().backward()
    assert q.grad is not None
    assert not q.grad[0, 0, :3].any()
    assert q.grad[0, 0, 4:].any()


def test_lowest_number_of_a_wider_dtype_still_means_the_mean() -> None:
    call = normal(1, 2, 2, 3, 8, 4)
    mask = torch.full((3, 8), torch.finfo(torch.float64).min, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        out, lse = exact(replace(call, attn_mask=mask), dtype)
        want = call.v.to(dtype).mean(2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out, want)
        assert lse.isfinite().all()


def test_nan_of_a_key_that_is_seen_is_not_hidden() -> None:
    call = normal(1, 1, 1, 4, 6, 4)
    call.v[0, 0, 2, 1] = math.nan
    out, _ = exact(call)
    assert out[..., 1].isnan().all()
    assert out[..., 0].isfinite().all()


def test_a_row_that_sees_nothing_is_zero_even_beside_nan() -> None:
    call = normal(1, 1, 1, 6, 5, 4, causal_offset=-3)
    call.v[0, 0, 0] = math.nan
    for dtype in (torch.float32, torch.float64):
        out, lse = exact(call, dtype)
        assert not out[0, 0, :3].any()
        assert (lse[0, 0, :3] == -math.inf).all()
        assert out[0, 0, 3:].isnan().all()
