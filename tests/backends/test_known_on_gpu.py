"""Known calls of `sagepatch.attention` on a GPU: their scratch memory comes from torch's allocator
without a tensor around it, and nobody else may write there while kernels use it.
"""

from __future__ import annotations

import threading

import pytest
import torch

import sagepatch
from sagepatch import known
from sagepatch.backends.catalogue import BY_NAME

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an sm_90 GPU")
both = pytest.mark.parametrize("name", ["cuda.sage2pp_8_d4", "triton.sage2_8"])
SHAPE = (1, 4, 700, 128)  # [B, H, S, D]


def tensors(seed: int) -> list[torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(SHAPE, generator=gen, device="cuda").bfloat16() for _ in range(3)]


def ask(name: str, given: list[torch.Tensor]) -> torch.Tensor:
    return sagepatch.attention(*given, variant=name)


@pytest.fixture
def expected(name: str) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Inputs and what a first call of their kind gives, which allocates by tensors of its own."""
    found = []
    for seed in range(4):
        known._KNOWN.clear()
        given = tensors(seed)
        found.append((given, ask(name, given)))
    torch.cuda.synchronize()
    assert len(known._KNOWN) == 1
    assert BY_NAME[name].toolchain == name.split(".")[0]
    return found


@both
def test_streams_side_by_side_do_not_share_scratch_memory(name, expected):
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(25):
        for stream, (given, wanted) in zip(streams, expected, strict=True):
            with torch.cuda.stream(stream):
                outs.append((ask(name, given), wanted))
                # What is free on this stream is written behind the kernels that used it.
                torch.empty(1 << 18, device="cuda").fill_(float("nan"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out, wanted in outs)


@both
def test_a_graph_keeps_its_scratch_memory(name, expected):
    inputs = [t.clone() for t in expected[0][0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [ask(name, inputs) for _ in range(2)]
    for given, wanted in expected:
        for place, tensor in zip(inputs, given, strict=True):
            place.copy_(tensor)
        # Whatever the allocator has free, eager calls among it.
        trash = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        assert torch.equal(ask(name, given), wanted)
        graph.replay()
        del trash
        assert all(torch.equal(out, wanted) for out in captured)


@both
def test_threads_with_streams_of_their_own(name, expected):
    wrong: list[int] = []
    start = threading.Barrier(8)

    def many(number: int) -> None:
        given, wanted = expected[number % len(expected)]
        start.wait()
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(ask(name, given), wanted):
                    wrong.append(number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@both
def test_memory_is_as_much_as_before(name, expected):
    given, _ = expected[0]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = ask(name, given)
    assert torch.cuda.memory_allocated() - before == out.untyped_storage().nbytes()
    del out
    assert torch.cuda.memory_allocated() == before


@both
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "no batch"])
def test_outputs_are_as_those_of_the_first_call(name, layout):
    q, k, v = (t[0] if layout == "no batch" else t for t in tensors(0))
    order = "BSHD" if layout == "BSHD" else "BHSD"
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    for lse in (False, True):
        known._KNOWN.clear()
        first, later = (
            sagepatch.attention(q, k, v, variant=name, layout=order, return_lse=lse)
            for _ in range(2)
        )
        pairs = zip(first, later, strict=True) if lse else [(first, later)]
        for one, other in pairs:
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert one.requires_grad is other.requires_grad is False


@both
def test_under_autocast_modes_and_gradients_known_calls_are_looked_at(name, expected):
    (q, k, v), wanted = expected[0]
    ask(name, [q, k, v])
    with torch.autocast("cuda", torch.float16):
        assert known.seen_of(q, k, v, None) is None
        assert ask(name, [q, k, v]).dtype == torch.float16
    with torch.inference_mode():
        out = ask(name, [q, k, v])
        assert out.is_inference()
        assert torch.equal(out, wanted)
    wants = q.clone().requires_grad_()
    assert known.seen_of(wants, k, v, None) is None
    with torch.no_grad():
        assert torch.equal(ask(name, [wants, k, v]), wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@both
def test_known_calls_on_a_device_that_is_not_current(name, expected):
    other = torch.device("cuda", 1)
    for given, wanted in expected:
        here, there = ask(name, given), ask(name, [t.to(other) for t in given])
        assert torch.cuda.current_device() == 0
        assert (here.device.index, there.device.index) == (0, 1)
        assert torch.equal(here, wanted)
        assert torch.equal(there.cpu(), wanted.cpu())
    # The first call on each device is checked; all later ones are known.
    assert len(known._KNOWN) == 2
