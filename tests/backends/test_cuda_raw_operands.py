"""What the Hopper kernel reads as it lies, and what the pre-pass copies for it: by what a tensor
map can describe, and the same output to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from attention_calls import poison, random_call
from cuda_support import DEVICE, check, make, needs_hopper

from sagepatch.backends import prepared
from sagepatch.backends.cuda import attention
from sagepatch.backends.cuda.raw_operands import map_strides, raw_strides, raw_value_strides
from sagepatch.backends.prepared import addresses_of, look_of
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

CPU = torch.device("cpu")
# Recipes whose V needs no code, in the dtype that they take as it is.
AS_IT_IS = [("sage2_8_bf16", torch.bfloat16), ("sage1_b_f32", torch.float16)]
as_it_is = pytest.mark.parametrize(("name", "dtype"), AS_IT_IS, ids=lambda x: str(x))


def copied(call, recipe, monkeypatch):
    """The output of the same call with V copied by the pre-pass."""
    with monkeypatch.context() as patched:
        patched.setattr(attention, "raw_value_strides", lambda *facts: None)
        patched.setattr(prepared, "_PREPARED", {})
        poison(call)
        return attention.run(call, recipe)[0]


@needs_hopper
@pytest.mark.parametrize("order", ["bhsd", "bshd", "one tensor"])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 2, 333, 700, 128), (1, 3, 3, 65, 129, 64), (2, 2, 1, 200, 1000, 128, 80),
     (1, 2, 2, 130, 300, 64, 40), (1, 2, 2, 130, 300, 192)],
    ids=str,
)  # fmt: skip
@as_it_is
def test_values_that_are_not_copied_give_the_same_to_the_bit(
    name, dtype, shape, order, monkeypatch
):
    recipe = RECIPES[name]
    call = make(shape, dtype=dtype)
    B, H, S, D = call.v.shape
    if order == "bshd":
        call = replace(call, v=call.v.transpose(1, 2).contiguous().transpose(1, 2))
    elif order == "one tensor":
        # K and V of a token side by side, as a fused projection leaves them; NaN around.
        both = torch.full((B, S + 3, 2, H, D), float("nan"), dtype=dtype, device=DEVICE)
        v = both[:, 1 : S + 1, 1].transpose(1, 2)
        v.copy_(call.v)
        call = replace(call, v=v)
    assert raw_value_strides(call, recipe) is not None
    for options in ({}, {"causal_offset": 60}, {"causal_offset": 60, "window": 200}):
        asked = replace(call, **options)
        out = check(asked, recipe)
        assert torch.equal(out, copied(asked, recipe, monkeypatch))


def shifted(x):
    """The same numbers in rows of one number more, the first of which no copy can start at."""
    rows = torch.empty(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype, device=x.device)[..., 1:]
    return rows.copy_(x)


@as_it_is
def test_which_values_are_read_as_they_lie(name, dtype):
    recipe = RECIPES[name]
    call = random_call(CPU, (2, 4, 2, 20, 30, 64), dtype=dtype)
    bshd = call.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert raw_value_strides(call, recipe) == (2 * 30 * 64, 30 * 64, 64)
    assert raw_value_strides(replace(call, v=bshd), recipe) == (2 * 30 * 64, 64, 2 * 64)
    assert raw_value_strides(replace(call, v=shifted(call.v)), recipe) is None
    assert raw_value_strides(replace(call, v=call.v[:1].expand_as(call.v)), recipe) is None
    mask = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    assert raw_value_strides(replace(call, attn_mask=mask), recipe) is None
    ends = torch.tensor([0, 30], dtype=torch.int32)
    packed = replace(call, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert raw_value_strides(packed, recipe) is None
    assert raw_value_strides(replace(call, v=call.v.float()), recipe) is None
    assert raw_value_strides(call, RECIPES["sage1_b"]) is None
    assert raw_value_strides(call, RECIPES["sage2_8"]) is None


def test_which_queries_are_read_as_they_lie():
    recipe = RECIPES["sage2_8"]
    call = random_call(CPU, (2, 4, 2, 20, 30, 64))
    bshd = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert raw_strides(call, recipe) == (4 * 20 * 64, 20 * 64, 64)
    assert raw_strides(replace(call, q=bshd), recipe) == (4 * 20 * 64, 64, 4 * 64)
    assert raw_strides(replace(call, q=shifted(call.q)), recipe) is None
    assert raw_strides(replace(call, q=call.q[:1].expand_as(call.q)), recipe) is None
    assert raw_strides(replace(call, q=call.q.float()), recipe) is None
    assert raw_strides(replace(call, return_lse=True), recipe) is None
    assert raw_strides(call, RECIPES["sage1_b"]) is None


def test_an_axis_of_one_element_has_a_stride_that_a_map_takes():
    x = torch.empty(8 * 64, dtype=torch.bfloat16).as_strided((1, 1, 8, 64), (3, 0, 64, 1))
    assert map_strides(x) == (8, 8, 64)


@needs_hopper
@as_it_is
def test_values_that_must_be_copied_give_the_same(name, dtype):
    recipe = RECIPES[name]
    call = make((2, 4, 2, 200, 300, 64), dtype=dtype)
    expected, _ = attention.run(call, recipe)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    for other in (replace(call, v=shifted(call.v)), replace(call, attn_mask=mask)):
        assert torch.equal(attention.run(other, recipe)[0], expected)


@needs_hopper
def test_queries_that_no_tensor_map_describes_get_their_codes_before():
    recipe = RECIPES["sage2_8"]
    call = make((2, 4, 2, 200, 300, 64))
    expected, _ = attention.run(call, recipe)
    for q in (call.q.transpose(1, 2).contiguous().transpose(1, 2), shifted(call.q)):
        assert torch.equal(attention.run(replace(call, q=q), recipe)[0], expected)
    one = call.q[:1].expand_as(call.q)
    expected, _ = attention.run(replace(call, q=one.contiguous()), recipe)
    assert torch.equal(attention.run(replace(call, q=one), recipe)[0], expected)


def test_a_call_kind_tells_apart_what_a_tensor_map_of_q_needs():
    def call_at(q_offset, k_offset):
        def tensor(offset):
            flat = torch.empty(16 * 64 + 64, dtype=torch.bfloat16)
            start = -(flat.data_ptr() // 2) % 8 + offset
            return flat[start : start + 16 * 64].view(1, 1, 16, 64)

        q, k, v = tensor(q_offset), tensor(k_offset), tensor(0)
        return Call(q, k, v, 0.125)

    recipe = RECIPES["sage2_8"]
    first, second = call_at(0, 1), call_at(1, 0)
    assert raw_strides(first, recipe) is not None
    assert raw_strides(second, recipe) is None
    looks = [look_of(c.q, c.k, c.v, None, addresses_of(c)) for c in (first, second)]
    assert looks[0] != looks[1]
