"""Calls and recipes that nobody thought of: the emulator against the second implementation, and
inputs of every size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from loop_reference import attention_by_the_book
from numerics_support import QUANTISED

from sagepatch.numerics import quantize
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

FEW = settings(max_examples=80, deadline=None, derandomize=True, database=None)
MANY = settings(FEW, max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
GRANULARITIES = ("token", "thread", "block", "tensor")


@st.composite
def calls(draw: st.DrawFn, spread: float = 1.0) -> Call:
    """Small calls with every option; tensors from a seed."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    Hkv, B = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Hq = Hkv * draw(st.integers(1, 2))
    Sq, Skv = draw(st.integers(1, 37)), draw(st.integers(1, 140))
    D, Dv = draw(st.integers(1, 24)), draw(st.integers(1, 12))
    sizes = [spread ** draw(st.floats(-1, 1)) for _ in range(3)]
    q = sizes[0] * torch.randn(B, Hq, Sq, D, generator=g)
    k = sizes[1] * (torch.randn(B, Hkv, Skv, D, generator=g) + draw(st.floats(-3, 3)))
    v = sizes[2] * (torch.randn(B, Hkv, Skv, Dv, generator=g) + draw(st.floats(-3, 3)))
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["none", "bool", "padding", "bias", "causal", "window"]))
    if kind == "bool":
        options["attn_mask"] = torch.rand(B, 1, Sq, Skv, generator=g) < draw(st.floats(0, 1))
    elif kind == "padding":
        options["attn_mask"] = torch.rand(B, 1, 1, Skv, generator=g) < draw(st.floats(0, 1))
    elif kind == "bias":
        bias = torch.randn(Hq, Sq, Skv, generator=g)
        hidden = torch.rand(Skv, generator=g) < 0.3
        lowest = torch.finfo(torch.float32).min
        options["attn_mask"] = bias.masked_fill(hidden, draw(st.sampled_from([-math.inf, lowest])))
    elif kind != "none":
        options["causal_offset"] = draw(st.integers(-Sq - 2, Skv + 2))
        if kind == "window":
            options["window"] = draw(st.integers(1, 90))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(0.5, 30))
    if draw(st.booleans()):
        options["sinks"] = 3 * torch.randn(Hq, generator=g)
    return Call(q, k, v, draw(st.sampled_from([1.0, 0.25, D**-0.5, -0.5])), **options)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """A recipe of the table with its optional fields set anew."""
    recipe = draw(st.sampled_from(QUANTISED))
    return replace(
        recipe,
        name="x",
        q_granularity=draw(st.sampled_from(GRANULARITIES)),
        k_granularity=draw(st.sampled_from(GRANULARITIES)),
        q_block=draw(st.sampled_from([16, 32, 128])),
        smooth_k=draw(st.booleans()),
        smooth_q=draw(st.booleans()),
        smooth_v=draw(st.booleans()),
        sum_quantised_p=draw(st.booleans()),
    )


def agrees(call: Call, recipe: Recipe) -> None:
    out, lse = emulate(call, recipe)
    want, want_lse = attention_by_the_book(call, recipe)
    assert out.isfinite().all()
    difference = (out - want).abs() / (1e-3 + want.abs().amax())
    # A probability at the edge between two codes may take the other one: a step of E4M3 in a row,
    # and in the row's sum where that is of codes.
    assert difference.max() < 0.02
    if lse.numel() >= 20:
        assert difference.median() < 1e-5
    slack = 0.02 if recipe.sum_quantised_p else 1e-4
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=slack)


@FEW
@given(calls(), recipes())
def test_any_call_equals_the_loop(call: Call, recipe: Recipe) -> None:
    agrees(call, recipe)


@pytest.mark.slow
@MANY
@given(calls(), recipes())
def test_any_call_equals_the_loop_at_length(call: Call, recipe: Recipe) -> None:
    agrees(call, recipe)


def stays_finite(call: Call, recipe: Recipe) -> None:
    """Within what fp32 holds an output is finite, and inside the range of V but for rounding."""
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v)):
        assume(tensor.abs().max() < 1e15 or name == "v")
    out, lse = emulate(call, recipe)
    assert out.isfinite().all()
    assert not lse.isnan().any()
    peak = call.v.abs().amax()
    slack = 1.3 if recipe.pv in ("e4m3", "e5m2") else 1.1
    # A hidden row is 0; whatever is seen is an average of V's codes.
    assert out.abs().max() <= slack * peak + 1e-6
    want_lse = exact(call, torch.float64)[1]
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    empty = want_lse == -math.inf
    assert not out[empty].any()


@FEW
@given(calls(1e14), recipes())
def test_inputs_of_any_size_stay_finite(call: Call, recipe: Recipe) -> None:
    stays_finite(call, recipe)


@pytest.mark.slow
@MANY
@given(calls(1e14), recipes())
def test_inputs_of_any_size_stay_finite_at_length(call: Call, recipe: Recipe) -> None:
    stays_finite(call, recipe)


@FEW
@given(calls(), recipes(), st.sampled_from(["q", "k", "v"]), st.sampled_from([math.nan, math.inf]))
def test_what_is_not_finite_is_never_hidden(
    call: Call, recipe: Recipe, where: str, bad: float
) -> None:
    """Put into a token of the first head that some query sees, or that sees some key."""
    call = replace(call, softcap=None, sinks=None)
    if where == "q":
        sees = exact(call)[1][0, 0] != -math.inf
        assume(bool(sees.any()))
        call.q[0, 0, int(sees.nonzero()[0])] = bad
    else:
        getattr(call, where)[0, 0, 0] = bad
        mask, offset = call.attn_mask, call.causal_offset
        first_row_sees_it = mask is None or mask.dtype == torch.bool
        assume(first_row_sees_it and offset in (None, 0) and call.window is None)
        if mask is not None:
            wide = mask.expand(call.q.shape[0], call.q.shape[1], call.q.shape[2], mask.shape[-1])
            assume(bool(wide[0, 0, 0, 0]))
    out, _ = emulate(call, recipe)
    assert not out[0, 0].isfinite().all()


@FEW
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from([7, 127]),
)
def test_integer_codes_of_any_numbers(values: list[float], largest: int) -> None:
    x = torch.tensor(values).unsqueeze(1)
    codes, scale = quantize.to_integer(x, torch.zeros(len(values), dtype=torch.int64), largest)
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() <= largest
    amax = x.abs().max().double()
    if amax >= 1e-30:
        assert codes.abs().max() == largest
        error = (codes.double() * scale.double() - x.double()).abs().max()
        assert error <= 0.5001 * amax / largest
