"""What a patch costs beside its kernels: the guard, and the check at a kernel's first use."""

from __future__ import annotations

import time

import pytest
import torch
from gpu.placed import HOPPER, KERNEL

from sagepatch.backends import selfcheck, unusable
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.timing import call_time
from sagepatch.dispatch import Request
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.ops import run_layer
from sagepatch.spec import Call


def layer(guard: str, kernel: str) -> PatchedLayer:
    made = PatchedLayer("site", "self", Policy(guard=guard), Request("exact"), unusable)
    made.run_with(Request(kernel), "asked for")
    return made


@pytest.mark.parametrize("kernel", [KERNEL, HOPPER])
def test_the_guard_costs_little(kernel: str) -> None:
    # case 39: no copy to the host, no wait; the exact kernel behind the flag leaves at once
    q, k, v = (torch.randn(1, 24, 4608, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    call = Call(q, k, v, 128**-0.5)
    times: dict[str, list[float]] = {"auto": [], "off": []}
    layers = {guard: layer(guard, kernel) for guard in times}
    for _ in range(5):
        for guard, taken in times.items():
            one = layers[guard]
            taken.append(
                call_time(lambda one=one: [run_layer(one, call) for _ in range(10)], q.device).us
            )
    auto, off = (min(times[guard]) / 10 for guard in ("auto", "off"))
    print(f"a call of {kernel} at 1x24x4608x128: {off:.0f} us, guarded {auto:.0f} us")
    assert auto < 1.10 * off


@pytest.mark.parametrize("kernel", [KERNEL, HOPPER])
def test_the_check_at_first_use_is_short_once_the_kernel_is_compiled(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = BY_NAME[kernel]
    assert selfcheck.failure(variant) is None
    # As in the next process: nothing is remembered, and nothing was kept on disk.
    monkeypatch.setattr(selfcheck, "_RESULTS", {})
    monkeypatch.setattr(selfcheck, "_kept", lambda facts: None)
    torch.cuda.synchronize()
    began = time.perf_counter()
    assert selfcheck.failure(variant) is None
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    print(f"{variant.name}: checked in {1e3 * took:.1f} ms")
    assert took < 0.1
