"""Several GPUs in one process, on fakes: every launcher enters the device of its tensors and leaves
the current one as it was, and each call gets a kernel for its own GPU. Cases 55 and 56.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.layers import call, layer
from models.virtual_gpu import VirtualGpu
from torch._subclasses.fake_tensor import FakeTensorMode

from sagepatch import layer as layers
from sagepatch.backends import memory, prepared
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.backends.cuda import attention as cuda
from sagepatch.backends.triton import attention as triton
from sagepatch.calibration.measure import Stopwatch
from sagepatch.calibration.timing import CallTime, call_time
from sagepatch.dispatch import Request, candidates
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

# Needs FP8, so sm_89 or newer.
EXACT, NEWER = "sdpa.exact", "triton.sage2_8"


class Devices:
    """Which fake device is current, and which was at each launch."""

    def __init__(self) -> None:
        self.current = 0
        self.launched: list[int] = []

    @contextmanager
    def entered(self, device: Any) -> Iterator[None]:
        number = device if isinstance(device, int) else torch.device(device).index
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.launched.append(self.current)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    fake = Devices()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", fake.entered)
    return fake


def fake_call(device: str) -> Call:
    made = call(B=1, H=2, Sq=64, Skv=64, D=64)
    q, k, v = (t.to(torch.bfloat16) for t in (made.q, made.k, made.v))
    with FakeTensorMode():
        there = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in (q, k, v)]
    return replace(made, q=there[0], k=there[1], v=there[2], return_lse=True)


LAUNCHERS = {
    "triton": (triton, "_launch", lambda c: triton.run(c, RECIPES["sage2_8"])),
    "triton, guarded": (
        triton,
        "_launch",
        lambda c: triton.run_guarded(c, RECIPES["sage2_8"], c.q.new_empty(2, dtype=torch.int32)),
    ),
}


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launch_happens_on_the_device_of_its_tensors(
    name: str, device: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inner, run = LAUNCHERS[name]
    monkeypatch.setattr(module, inner, devices.launch)
    out, lse = run(fake_call(device))
    assert devices.launched == [torch.device(device).index]
    assert out.device == lse.device == torch.device(device)
    assert devices.current == 0


class Begun(Exception):
    """Far enough: what follows needs a GPU."""


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_first_call_on_hopper_happens_on_the_device_of_its_tensors(
    device: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*args: Any, **options: Any) -> None:
        devices.launch()
        raise Begun

    monkeypatch.setattr(cuda, "form_of", begun)
    monkeypatch.setattr(prepared, "addresses_of", lambda call: (0,) * 6)
    monkeypatch.setattr(prepared, "kind_of", lambda call, look: ("never seen", device))
    with pytest.raises(Begun):
        cuda.run(fake_call(device), RECIPES["sage2_8"])
    assert devices.launched == [torch.device(device).index]
    assert devices.current == 0


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_later_call_happens_on_the_device_of_its_tensors(
    device: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        asked.append(("tensor", devices.current))
        return torch.empty_strided(shape, strides, dtype=dtype)

    def take(size: int, stream: int) -> int:
        asked.append(("scratch", devices.current))
        return 4096

    monkeypatch.setattr(memory, "empty", empty)
    monkeypatch.setattr(memory, "take", take)
    monkeypatch.setattr(memory, "give", lambda address: asked.append(("given", devices.current)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: 7, raising=False)
    known: Any = devices.launch  # a chain is called with the device number first
    made = prepared.Prepared(known, 64, fake_call(device), RECIPES["sage2_8"], 1.0)
    out, lse = made((0,) * 6, 1.0, made.form)
    assert tuple(out.shape) == (1, 2, 64, 64)
    assert lse is not None
    number = torch.device(device).index
    assert asked == [(what, number) for what in ("tensor", "tensor", "scratch", "given")]
    assert devices.launched == [number]
    assert devices.current == 0


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_kernel_is_timed_on_the_device_of_its_tensors(
    device: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = VirtualGpu(monkeypatch)

    def launch() -> None:
        devices.launch()
        gpu.queue(10.0, 1e3)

    assert call_time(launch, torch.device(device)).us == pytest.approx(1e3)
    assert set(devices.launched) == {torch.device(device).index}
    assert devices.current == 0


def on_gpu(arch: int) -> Any:
    """The description of a call on a GPU of that architecture."""
    return replace(call(Sq=4096, Skv=4096, D=64).spec(), device="cuda", arch=arch, dtype="bf16")


def test_one_layer_runs_a_kernel_of_each_gpu_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "failure", lambda variant, gpu: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one = layer(emulate=False)
    one.unusable = lambda variant: None
    one.run_with(Request(NEWER), "asked for")
    newest, older, oldest = (on_gpu(arch) for arch in (90, 89, 86))
    assert one.choose(newest) == one.choose(older) == (BY_NAME[NEWER], None)
    variant, reason = one.choose(oldest)
    assert variant.name == EXACT
    assert reason is not None
    assert "GPU is sm_86, needs sm_89" in reason
    # Both are remembered apart: going back and forth changes nothing.
    assert [one.choose(spec)[0].name for spec in (oldest, newest, oldest)] == [EXACT, NEWER, EXACT]


def test_a_kernel_of_one_architecture_is_refused_on_another_by_both_names() -> None:
    spec = on_gpu(86)
    hopper = [v for v in BY_NAME.values() if v.archs == frozenset({90}) and v.toolchain == "cuda"]
    assert hopper
    for variant in hopper:
        (decision,) = candidates(spec, Request(variant.name), lambda v: None)
        assert any("GPU is sm_86, needs sm_90" in reason for reason in decision.reasons)


def test_times_of_two_kinds_of_gpu_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from sagepatch.calibration import measure

    times = iter((10.0, 10.0, 20.0, 20.0))
    monkeypatch.setitem(measure.TIMERS, "cuda", lambda *_: CallTime(next(times), 0.0))
    stopwatch, one, exact = Stopwatch(), call(), BY_NAME[EXACT]
    for _ in range(2):
        assert stopwatch.us(exact, one, on_gpu(90)) == 10.0
    for _ in range(2):
        assert stopwatch.us(exact, one, on_gpu(86)) == 20.0
