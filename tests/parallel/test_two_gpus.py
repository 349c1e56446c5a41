"""Two GPUs in one process: tensors on one that is not current, a model over both, threads, graphs.
Cases 55 and 56 on real devices.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models.stacks import stack, tokens
from models.transformers_models import first_output, tiny_llama
from parallel.work import on_device
from parallel.work import run as run_model
from torch import Tensor, nn

import sagepatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RECIPE = "sage2_8b_k128"
KERNEL = f"triton.{RECIPE}"
DEVICES = ("cuda:0", "cuda:1")


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def long(device: str) -> tuple[nn.Module, Tensor]:
    """Two layers of 4 heads of 64 over 2048 tokens."""
    model = stack(2, 256).to(device, torch.bfloat16)
    for block in model:
        block.heads = 4
    return model, tokens(2048, 256, 1).to(device, torch.bfloat16)


def test_on_a_gpu_that_is_not_current() -> None:
    torch.cuda.set_device(0)
    outs = []
    for device in DEVICES:
        model, inputs = on_device("flux", device)
        model = model.bfloat16()
        with sagepatch.apply(model, variant=RECIPE) as patch:
            with torch.autocast("cuda", torch.bfloat16):
                outs.append(run_model(model, inputs).cpu())
            assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
            assert not any(layer.demoted for layer in patch.layers)
        assert torch.cuda.current_device() == 0
    assert torch.equal(*outs)


def test_calibrated_on_a_gpu_that_is_not_current() -> None:
    torch.cuda.set_device(0)
    model, x = long("cuda:1")
    plain = run(model, x)
    calibration = sagepatch.calibrate(model, run=lambda: [run(model, x) for _ in range(2)])
    assert all(layer.timed and layer.candidates for layer in calibration.layers)
    with sagepatch.apply(model, plan=calibration.plan()) as patch:
        off = (run(model, x) - plain).norm() / plain.norm()
        assert off < 0.1
        assert patch.locked
    assert torch.cuda.current_device() == 0


def test_a_language_model_over_both() -> None:
    from accelerate import dispatch_model

    model, inputs = tiny_llama(4)
    model = model.to(torch.bfloat16)
    given: dict[str, Any] = {name: value.to("cuda:0") for name, value in inputs.items()}
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{number}": number // 2 for number in range(4)}
    model = dispatch_model(model, places)
    plain = first_output(model, given)
    patch = sagepatch.apply(model, variant=RECIPE)
    out = first_output(model, given)
    assert 0 < ((out - plain).norm() / plain.norm()).item() < 0.1
    assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
    patch.restore()
    assert torch.equal(first_output(model, given), plain)


def test_replicas_of_data_parallel() -> None:
    model, _ = long("cuda:0")
    x = tokens(2048, 256, 4).to("cuda:0", torch.bfloat16)
    patch = sagepatch.apply(model, variant=RECIPE)
    halves = [run(model, half.contiguous()) for half in x.chunk(2)]
    out = run(nn.DataParallel(model, [0, 1]), x)
    assert torch.equal(out, torch.cat(halves))
    # Each replica calls each layer once; two threads count.
    assert all(set(layer.record.by_variant) == {KERNEL} for layer in patch.layers)
    patch.restore()
    exact = run(nn.DataParallel(model, [0, 1]), x)
    assert 0 < ((out - exact).norm() / exact.norm()).item() < 0.1


def test_two_models_in_two_threads() -> None:
    expected, found = {}, {}
    models = {device: long(device) for device in DEVICES}
    for device, (model, x) in models.items():
        sagepatch.apply(model, variant=RECIPE)
        expected[device] = run(model, x).cpu()

    def work(device: str) -> None:
        # Neither thread makes its device the current one.
        model, x = models[device]
        found[device] = [run(model, x).cpu() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in DEVICES:
        assert len(found[device]) == 20
        assert all(torch.equal(out, expected[device]) for out in found[device])


def test_a_graph_of_the_second() -> None:
    model, x = long("cuda:1")
    sagepatch.apply(model, variant=RECIPE)
    with torch.cuda.device(1):
        for _ in range(2):
            expected = run(model, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(model, x)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, expected)
