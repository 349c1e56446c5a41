"""Memory of one call: torch's own ways give what its documented functions give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sagepatch.backends import memory

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS = ((1, 3, 5, 8), (120, 8, 24, 1))  # [B, Hq, Sq, Dv] over memory of [B, Sq, Hq, Dv]


@gpu
@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_is_as_torch_makes_it(inference: bool) -> None:
    with torch.inference_mode(inference):
        made, expected = (
            way(*ROWS, torch.bfloat16) for way in (memory.empty, memory.empty_of_torch)
        )
    for told in ("shape", "dtype", "device", "requires_grad", "is_leaf", "layout"):
        assert getattr(made, told) == getattr(expected, told), told
    assert made.stride() == expected.stride()
    assert made.is_inference() == expected.is_inference() == inference
    assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(expected)
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


@gpu
def test_scratch_memory_comes_from_the_allocator_and_goes_back() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        raw = stream.cuda_stream
        before = torch.cuda.memory_allocated()
        first = memory.take(3 << 20, raw)
        second = memory.take(3 << 20, raw)
        assert torch.cuda.memory_allocated() - before >= 6 << 20
        assert abs(first - second) >= 3 << 20
        assert first % 512 == second % 512 == 0
        memory.give(first)
        memory.give(second)
        assert torch.cuda.memory_allocated() == before
        # Whatever comes next on this stream may have it, and nothing on another one.
        again = memory.take(3 << 20, raw)
        assert again in (first, second)
        memory.give(again)
        with torch.cuda.stream(torch.cuda.Stream()):
            elsewhere = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        assert elsewhere.data_ptr() not in (first, second)


@gpu
def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        memory.take(1 << 50, torch.cuda.current_stream().cuda_stream)


def test_a_torch_without_its_own_ways_gives_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    genuine = torch.empty

    def empty(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        asked.append((size, device))
        return genuine(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    first, second = memory.take_of_torch(100, 7), memory.take_of_torch(50, 7)
    assert asked == [(100, "cuda"), (50, "cuda")]
    assert {at: t.numel() for at, t in memory._TAKEN.items()} == {first: 100, second: 50}
    memory.give_of_torch(first)
    assert list(memory._TAKEN) == [second]
    memory.give_of_torch(second)
    assert not memory._TAKEN
    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda shape, strides, dtype, device: SimpleNamespace(asked=(shape, strides, device)),
    )
    assert memory.empty_of_torch(*ROWS, torch.float16).asked == (*ROWS, "cuda")


# Once wrong: empty tensors all lie at 0, and what the second call gave back was not there.
@pytest.mark.parametrize("way", ["documented", pytest.param("torch's own", marks=gpu)])
def test_no_bytes_can_be_taken_twice(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take, give = memory.take, memory.give
    if way == "documented":
        genuine = torch.empty
        on_cpu = lambda size, dtype, device: genuine(size, dtype=dtype)  # noqa: E731
        monkeypatch.setattr(torch, "empty", on_cpu)
        take, give = memory.take_of_torch, memory.give_of_torch
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    taken = [take(0, stream), take(0, stream)]
    assert taken == [0, 0]
    for address in taken:
        give(address)
    assert not memory._TAKEN


@pytest.mark.parametrize("absent", ["guards", "allocator"])
def test_each_way_is_taken_where_torch_has_it(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    names = ("_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete")
    try:
        if absent == "guards":
            monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
            for name in names:
                monkeypatch.setattr(torch._C, name, lambda *of, name=name: name, raising=False)
        else:
            for name in names:
                monkeypatch.delattr(torch._C, name, raising=False)
        made = importlib.reload(memory)
        if absent == "guards":
            assert made.empty is made.empty_of_torch
            assert (made.take(1, 2), made.give(3)) == names
        else:
            assert (made.take, made.give) == (made.take_of_torch, made.give_of_torch)
    finally:
        monkeypatch.undo()
        importlib.reload(memory)
