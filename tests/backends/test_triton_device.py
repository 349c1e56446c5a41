"""What only a GPU can show of the Triton kernels: graphs, streams, devices, replays, threads, the
known-answer check and the guard of a patched layer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_contract import threads_share_kernels
from triton_support import DEVICE, ON_GPU, check, make, tensors

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")

import sagepatch  # noqa: E402
from sagepatch.backends import prepared, selfcheck  # noqa: E402
from sagepatch.backends.catalogue import TRITON  # noqa: E402
from sagepatch.backends.triton import attention  # noqa: E402
from sagepatch.dispatch import Request  # noqa: E402
from sagepatch.layer import PatchedLayer, Policy  # noqa: E402
from sagepatch.numerics.attention import exact  # noqa: E402
from sagepatch.numerics.metrics import compare  # noqa: E402
from sagepatch.numerics.recipe import RECIPES  # noqa: E402
from sagepatch.ops import run_layer  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

SHAPE = (2, 4, 2, 130, 257, 64)
few = pytest.mark.parametrize("name", ["sage2_8", "sage2_8b_k128", "sage1_b"])
OPTIONS = {
    "plain": {},
    "causal": {"causal_offset": 127},
    "mask": {"attn_mask": torch.arange(257, device=DEVICE).view(1, 1, 1, -1) < 200},
}


# A captured graph serves new inputs, bit for bit.
@few
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_cuda_graphs_replay_on_new_inputs(name, options):
    recipe = RECIPES[name]
    call = make(SHAPE, **options)
    attention.run(call, recipe)
    attention.run(call, recipe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attention.run(call, recipe)
    for seed in (1, 2):
        for mine, new in zip((call.q, call.k, call.v), tensors(*SHAPE, seed=seed), strict=True):
            mine.copy_(new)
        graph.replay()
        eager, _ = attention.run(call, recipe)
        assert torch.equal(out, eager)


@few
def test_a_side_stream_is_the_stream_of_the_launches(name):
    recipe = RECIPES[name]
    call = make(SHAPE)
    expected, _ = attention.run(call, recipe)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # A kernel on another stream would read the tensors before they are filled.
        late = [torch.full_like(t, float("nan")) for t in (call.q, call.k, call.v)]
        torch.cuda._sleep(20_000_000)
        for mine, real in zip(late, (call.q, call.k, call.v), strict=True):
            mine.copy_(real)
        out, _ = attention.run(Call(*late, call.scale), recipe)
    side.synchronize()
    assert torch.equal(out, expected)


# case 55
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@few
@pytest.mark.parametrize("guarded", [False, True])
def test_tensors_on_a_device_that_is_not_current(name, guarded):
    recipe = RECIPES[name]
    there = [t.to("cuda:1") for t in tensors(*SHAPE)]
    call = Call(*there, 0.125)
    expected, _ = attention.run(make(SHAPE), recipe)
    with torch.cuda.device(0):
        if guarded:
            flags = torch.zeros(2, dtype=torch.int32, device="cuda:1")
            out, _ = attention.run_guarded(call, recipe, flags)
        else:
            out, _ = attention.run(call, recipe)
    assert torch.equal(out.cpu(), expected.cpu())


# A call like an earlier one replays its launches with new pointers.
@few
@pytest.mark.parametrize("guarded", [False, True])
def test_replays_follow_their_tensors(name, guarded):
    recipe = RECIPES[name]
    flags = torch.zeros(2, dtype=torch.int32, device=DEVICE)

    def run(call):
        return (
            attention.run_guarded(call, recipe, flags) if guarded else attention.run(call, recipe)
        )

    prepared._PREPARED.clear()
    calls = [make(SHAPE, seed=seed) for seed in range(3)]
    first = [run(call)[0] for call in calls]
    prepared._PREPARED.clear()
    for call, out in zip(calls, first, strict=True):
        prepared._PREPARED.clear()
        assert torch.equal(run(call)[0], out)
    assert prepared._PREPARED
    # Another shape, dtype, scale or alignment is another call.
    for other in (
        make((2, 4, 2, 131, 257, 64)),
        make(SHAPE, scale=0.3),
        Call(*(t.half() for t in (calls[0].q, calls[0].k, calls[0].v)), 0.125),
        Call(
            *(torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t) for t in tensors(*SHAPE)),
            0.125,
        ),
    ):
        check(other, recipe)


# case 50
def test_threads_share_kernels_and_replays():
    names = ["sage2_8", "sage1_b", "sage2_8b_k128", "sage1_t"]
    call = make(SHAPE)
    threads_share_kernels(attention.run, call, names)


# case 61
@pytest.mark.parametrize("variant", TRITON, ids=lambda v: v.name)
def test_every_kernel_knows_its_answer(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("SAGEPATCH_CACHE_DIR", str(tmp_path))
    selfcheck._RESULTS.clear()
    assert selfcheck.failure(variant) is None
    kept = list((tmp_path / "checks").iterdir())
    assert len(kept) == 1
    # A second process does not run it again.
    selfcheck._RESULTS.clear()
    monkeypatch.setattr(selfcheck, "_check", lambda *_: "ran again")
    assert selfcheck.failure(variant) is None
    selfcheck._RESULTS.clear()


def _layer(name, guard="auto"):
    policy = Policy(guard=guard)
    return PatchedLayer("block.attn", "self", policy, Request(name), lambda variant: None)


# cases 26 and 47: the guard of a layer, without a synchronisation
@pytest.mark.parametrize("guard", ["auto", "sync"])
def test_a_non_finite_output_on_finite_inputs_is_recomputed_and_the_layer_demoted(
    guard, monkeypatch
):
    monkeypatch.setattr(
        selfcheck, "_RESULTS", {(v.name, torch.cuda.get_device_name()): None for v in TRITON}
    )
    layer = _layer("triton.sage2_8", guard)
    good = make(SHAPE)
    fine, _ = run_layer(layer, good)
    assert torch.equal(fine, attention.run(good, RECIPES["sage2_8"])[0])
    # A value scale gone wrong in the kernel: everything it writes is infinite.
    real = attention.prepare

    def broken(*args):
        codes = real(*args)
        codes.v_scale.fill_(float("inf"))
        return codes

    monkeypatch.setattr(attention, "prepare", broken)
    masked = replace(good, attn_mask=torch.ones(1, 1, 1, 257, dtype=torch.bool, device=DEVICE))
    out, _ = run_layer(layer, masked)
    assert compare(out.float(), exact(masked)[0]).worst.rel_l1 < 1e-2
    layer.ask_guards()
    assert layer.demoted is not None
    assert "non-finite" in layer.demoted
    assert layer.choose(masked.spec())[0].name == "sdpa.exact"


def test_inputs_that_are_not_finite_do_not_demote():
    layer = _layer("triton.sage2_8")
    bad = make(SHAPE)
    bad.v[0, 0, 0, 0] = float("nan")
    out, _ = run_layer(layer, bad)
    assert not bool(out.isfinite().all())
    layer.ask_guards()
    assert layer.demoted is None
    good = make(SHAPE)
    out, _ = run_layer(layer, good)
    assert torch.equal(out, attention.run(good, RECIPES["sage2_8"])[0])


def test_the_host_learns_of_it_without_asking():
    layer = _layer("triton.sage2_8")
    call = make(SHAPE)
    run_layer(layer, call)
    guard = layer.guard(call.q.device)
    guard.flags.copy_(torch.tensor([1, 0], dtype=torch.int32))
    for _ in range(5):
        run_layer(layer, call)
        torch.cuda.synchronize()
    assert layer.demoted is not None


def test_a_guarded_layer_in_a_graph():
    layer = _layer("triton.sage2_8")
    call = make(SHAPE)
    for _ in range(3):
        run_layer(layer, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run_layer(layer, call)
    graph.replay()
    assert torch.equal(out, attention.run(call, RECIPES["sage2_8"])[0])


def test_a_kernel_that_does_not_fit_demotes_before_it_writes(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def too_large(*args, **kwargs):
        raise OutOfResources(300000, 232448, "shared memory")

    layer = _layer("triton.sage2_8")
    call = make((1, 2, 2, 66, 100, 64))
    run_layer(layer, make(SHAPE))
    monkeypatch.setattr(attention, "attend", too_large)
    out, _ = run_layer(layer, replace(call, scale=0.2))
    assert "does not compile" in layer.demoted
    assert compare(out.float(), exact(replace(call, scale=0.2))[0]).worst.rel_l1 < 1e-2


@pytest.mark.parametrize("name", ["triton.sage2_8", "triton.sage1_b"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compiled_functions_equal_eager(name, mode):
    def block(q, k, v):
        return sagepatch.attention(q * 1.0, k, v, variant=name) * 2

    q, k, v = tensors(*SHAPE)
    eager = block(q, k, v)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(3):
        assert torch.equal(compiled(q, k, v), eager)


@pytest.mark.parametrize("name", ["sage2_8", "sage1_b"])
def test_two_runs_agree_to_the_bit(name):
    call = make((2, 8, 2, 1001, 3001, 128), causal_offset=2000, return_lse=True)
    out, lse = attention.run(call, RECIPES[name])
    for _ in range(5):
        again, again_lse = attention.run(call, RECIPES[name])
        assert torch.equal(out, again)
        assert torch.equal(lse, again_lse)
