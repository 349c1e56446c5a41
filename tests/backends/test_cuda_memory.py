"""The Hopper kernel and memory: layouts, bytes that are not finite, streams,
threads, devices, graphs, very long calls, many heads and offsets past 2^31.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_support import DEVICE, check, every_recipe, make, needs_hopper
from kernel_contract import threads_share_kernels

from sagepatch.backends import selfcheck
from sagepatch.backends.catalogue import CUDA
from sagepatch.backends.cuda import attention
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

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


def _strided(kind: str, t: torch.Tensor) -> torch.Tensor:
    if kind == "tokens first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "last stride":
        return t.mT.contiguous().mT
    if kind == "every other":
        return t.repeat_interleave(2, 2)[:, :, ::2]
    if kind == "odd address":
        return torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t)
    if kind == "odd stride of one":
        one = t[:1, :1].contiguous()
        return one.as_strided(one.shape, (7, 13, *one.stride()[2:]))
    return t[:1].expand(2, -1, -1, -1)


# case 7
KINDS = [
    *("tokens first", "last stride", "every other", "odd address", "batch stride 0"),
    "odd stride of one",
]


@pytest.mark.parametrize("kind", KINDS)
@every_recipe
def test_strides_are_read_as_they_are(recipe, kind):
    call = make((2, 2, 2, 70, 90, 64))
    q, k, v = (_strided(kind, t) for t in (call.q, call.k, call.v))
    before = [t.clone() for t in (q, k, v)]
    out, _ = attention.run(replace(call, q=q, k=k, v=v), recipe)
    plain, _ = attention.run(
        replace(call, q=before[0].contiguous(), k=before[1].contiguous(), v=before[2].contiguous()),
        recipe,
    )
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


few = pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d4", "sage1_b_f32"])


# case 4
@pytest.mark.parametrize("shape", [(65536, 1, 1, 16, 16, 40), (1, 65536, 65536, 10, 10, 64)])
@few
def test_more_heads_than_a_grid_axis(name, shape):
    recipe = RECIPES[name]
    call = make(shape)
    out, _ = attention.run(call, recipe)
    assert out.isfinite().all()
    axis = 0 if shape[0] > 1 else 1
    for part in (slice(0, 8), slice(-8, None)):
        at = (part,) if axis == 0 else (slice(None), part)
        alone = Call(call.q[at], call.k[at], call.v[at], call.scale)
        assert torch.equal(out[at], check(alone, recipe))


# case 55
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@few
def test_tensors_on_a_device_that_is_not_current(name):
    call = make((2, 4, 2, 130, 257, 64))
    there = Call(*(t.to("cuda:1") for t in (call.q, call.k, call.v)), call.scale)
    expected, _ = attention.run(call, RECIPES[name])
    out, _ = attention.run(there, RECIPES[name])
    assert out.device.index == 1
    assert torch.equal(out.cpu(), expected.cpu())


# case 50
def test_threads_share_kernels():
    names = ["sage2_8", "sage2pp_8_d4", "sage1_b"]
    call = make((2, 4, 2, 130, 257, 64))
    threads_share_kernels(attention.run, call, names)


# case 61
@pytest.mark.parametrize("variant", CUDA, ids=lambda v: v.name)
def test_every_kernel_knows_its_answer(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path))
    selfcheck._RESULTS.clear()
    assert selfcheck.failure(variant) is None
    assert len(list((tmp_path / "checks").iterdir())) == 1
    # A second process does not run it again.
    selfcheck._RESULTS.clear()
    monkeypatch.setattr(selfcheck, "_check", lambda *_: "ran again")
    assert selfcheck.failure(variant) is None
    selfcheck._RESULTS.clear()
