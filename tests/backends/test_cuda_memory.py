"""The Hopper kernel and memory: layouts, queries as they come, bytes that are not finite, streams,
graphs, very long calls and offsets past 2^31.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_support import DEVICE, check, every_recipe, make, needs_hopper

from sagepatch.backends.cuda import attention
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES

pytestmark = needs_hopper


# case 9, case 10
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 2, 130, 60, 64), (1, 8, 8, 8, 8, 64)], ids=str)
def test_memory_orders(shape, dtype):
    call = make(shape, bshd_out=True, dtype=dtype)
    out = check(call, RECIPES["sage2_8"])
    assert out.transpose(1, 2).is_contiguous()
    plain, _ = attention.run(replace(call, bshd_out=False), RECIPES["sage2_8"])
    assert plain.is_contiguous()
    assert torch.equal(plain, out)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@every_recipe
def test_nan_reaches_the_output(recipe, which):
    call = make((1, 2, 2, 200, 300, 64))
    tensor = getattr(call, which)
    tensor[0, 1, 150, 7] = float("nan")
    out, _ = attention.run(call, recipe)
    assert out[0, 1].isnan().any()
    assert out[0, 0].isfinite().all()


def test_nothing_to_see_and_nothing_to_ask():
    recipe = RECIPES["sage2_8"]
    out, lse = attention.run(make((1, 2, 2, 5, 0, 64), return_lse=True), recipe)
    assert not out.any()
    assert lse is not None
    assert (lse == -torch.inf).all()
    out, _ = attention.run(make((1, 2, 2, 0, 5, 64)), recipe)
    assert out.shape == (1, 2, 0, 64)


def test_queries_that_no_tensor_map_describes_get_their_codes_before():
    recipe = RECIPES["sage2_8"]
    call = make((2, 4, 2, 200, 300, 64))
    expected, _ = attention.run(call, recipe)
    odd = torch.empty(2, 4, 200, 65, dtype=call.q.dtype, device=DEVICE)[..., 1:]
    odd.copy_(call.q)
    one = call.q[:1].expand_as(call.q)
    bshd = call.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attention.raw_strides(call, recipe)
    assert attention.raw_strides(replace(call, q=bshd), recipe)
    assert attention.raw_strides(replace(call, q=odd), recipe) is None
    assert attention.raw_strides(replace(call, q=one), recipe) is None
    assert attention.raw_strides(replace(call, return_lse=True), recipe) is None
    assert attention.raw_strides(call, RECIPES["sage1_b"]) is None
    for q in (bshd, odd):
        assert torch.equal(attention.run(replace(call, q=q), recipe)[0], expected)
    expected, _ = attention.run(replace(call, q=one.contiguous()), recipe)
    assert torch.equal(attention.run(replace(call, q=one), recipe)[0], expected)


@pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d4"])
def test_streams_and_graphs(name):
    recipe = RECIPES[name]
    call = make((1, 8, 8, 1000, 1000, 128))
    expected, _ = attention.run(call, recipe)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside, _ = attention.run(call, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(expected, beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = attention.run(call, recipe)
    captured.zero_()
    graph.replay()
    assert torch.equal(expected, captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d6", "sage1_b_f32"])
def test_very_long_and_past_two_to_the_31st(name):
    recipe = RECIPES[name]
    long = make((1, 1, 1, 200, 200_000, 64))
    out, _ = attention.run(long, recipe)
    assert compare(out.float(), exact(long)[0]).worst.cosine > 0.998
    # The last of many heads lies past 2^31 elements of q and out.
    q = torch.zeros(1, 140_000, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    small = make((1, 1, 1, 128, 100, 128))
    q[:, -1] = small.q[0]
    k, v = (t.expand(1, 1, -1, -1) for t in (small.k, small.v))
    out, _ = attention.run(replace(small, q=q, k=k, v=v), recipe)
    alone, _ = attention.run(small, recipe)
    assert torch.equal(out[:, -1], alone[0, :1])
