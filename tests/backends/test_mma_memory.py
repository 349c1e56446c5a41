"""Memory, devices and threads of the mma.sync kernels: strides, lengths of nothing, many heads, far
offsets, other GPUs, graphs. On a GPU, or else their source on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from kernel_contract import threads_share_kernels
from mma_support import (
    DEVICE,
    ON_GPU,
    RUNS,
    WHY_NOT,
    check,
    each,
    kernels_here,  # noqa: F401
    make,
    run,
)

from sagepatch.backends import selfcheck
from sagepatch.backends.catalogue import CUDA_MMA
from sagepatch.backends.cuda_mma import attention
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

pytestmark = [
    pytest.mark.skipif(not RUNS, reason=WHY_NOT),
    pytest.mark.usefixtures("kernels_here"),
]
recipes = pytest.mark.parametrize("name", each(["sage2_8"]))
few = pytest.mark.parametrize("name", ["sage2pp_8", "sage1_b", "sage2_4"])
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def strided(kind: str, t: torch.Tensor) -> torch.Tensor:
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


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
@recipes
def test_strides_are_read_as_they_are(name, kind):
    call = make((2, 2, 2, 70, 90, 64))
    q, k, v = (strided(kind, t) for t in (call.q, call.k, call.v))
    before = [t.clone() for t in (q, k, v)]
    out, _ = run(replace(call, q=q, k=k, v=v), RECIPES[name])
    apart = [t.clone(memory_format=torch.contiguous_format) for t in before]
    plain, _ = run(replace(call, q=apart[0], k=apart[1], v=apart[2]), RECIPES[name])
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def test_sinks_with_gaps_in_memory():
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(3)).to(DEVICE)[::2]
    check(make((2, 4, 2, 70, 90, 64), sinks=sinks), RECIPES["sage2_8"])


def test_nothing_to_attend_to():
    recipe = RECIPES["sage2_8"]
    out, lse = attention.run(make((1, 2, 2, 5, 0, 64), return_lse=True), recipe)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, _ = attention.run(make((1, 2, 2, 0, 5, 64)), recipe)
    assert out.shape == (1, 2, 0, 64)


# case 4
@on_gpu
@pytest.mark.parametrize("shape", [(65536, 1, 1, 16, 16, 40), (1, 65536, 65536, 10, 10, 64)])
@few
def test_more_heads_than_a_grid_axis(name, shape):
    call = make(shape)
    out, _ = attention.run(call, RECIPES[name])
    assert out.isfinite().all()
    axis = 0 if shape[0] > 1 else 1
    for part in (slice(0, 8), slice(-8, None)):
        at = (part,) if axis == 0 else (slice(None), part)
        alone = Call(call.q[at], call.k[at], call.v[at], call.scale)
        assert torch.equal(out[at], check(alone, RECIPES[name]))


# The last tokens of a buffer of 2^31 elements and more, by strides.
@on_gpu
@pytest.mark.slow
@few
def test_offsets_beyond_31_bits(name):
    call = make((1, 1, 1, 256, 256, 128))
    stride = (1 << 31) // 200
    memory = torch.zeros(255 * stride + 128, device=DEVICE, dtype=torch.float16)
    far = memory.as_strided((1, 1, 256, 128), (0, 0, stride, 1))
    far.copy_(call.k)
    out, _ = attention.run(replace(call, k=far), RECIPES[name])
    plain, _ = attention.run(call, RECIPES[name])
    assert torch.equal(out, plain)


# case 55
@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@few
def test_tensors_on_a_device_that_is_not_current(name):
    call = make((2, 4, 2, 130, 257, 64))
    expected, _ = attention.run(call, RECIPES[name])
    there = replace(call, **{n: getattr(call, n).to("cuda:1") for n in ("q", "k", "v")})
    out, _ = attention.run(there, RECIPES[name])
    assert torch.equal(out.cpu(), expected.cpu())


# A captured graph serves new inputs, bit for bit.
@on_gpu
@pytest.mark.parametrize("options", [{}, {"causal_offset": 127}], ids=["plain", "causal"])
@few
def test_graphs_replay_on_new_inputs(name, options):
    recipe = RECIPES[name]
    call = make((2, 4, 2, 130, 257, 64), **options)
    attention.run(call, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attention.run(call, recipe)
    for seed in (1, 2):
        other = make((2, 4, 2, 130, 257, 64), seed=seed)
        for mine, new in ((call.q, other.q), (call.k, other.k), (call.v, other.v)):
            mine.copy_(new)
        graph.replay()
        assert torch.equal(out, attention.run(call, recipe)[0])


# case 50
@on_gpu
def test_threads_share_kernels():
    names = ["sage2_8", "sage1_b", "sage2pp_4", "sage1_vt"]
    call = make((2, 4, 2, 130, 257, 64))
    threads_share_kernels(attention.run, call, names)


# case 61
@on_gpu
@pytest.mark.parametrize("variant", CUDA_MMA, ids=lambda v: v.name)
def test_every_kernel_knows_its_answer(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_RESULTS", {})
    assert selfcheck.failure(variant) is None
    assert len(list((tmp_path / "checks").iterdir())) == 1
