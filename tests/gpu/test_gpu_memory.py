"""Offloading, placing and moving of patched models on a GPU, and the memory that a patch takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.placed import EXACT, HOPPER, KERNEL, RECIPE, built, error, placed, run
from models.diffusers_pipelines import tiny_flux_pipeline
from torch import Tensor, nn

import sagepatch

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def _group(kind: str, **options: Any) -> Callable[[nn.Module], None]:
    def switch_on(model: nn.Module) -> None:
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(model, GPU, CPU, kind, **options)

    return switch_on


def _sequential(model: nn.Module) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, GPU)


def _whole(model: nn.Module) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(model, GPU)


def _mapped(model: nn.Module) -> None:
    """Every other part waits on the CPU."""
    from accelerate import dispatch_model

    parts = [name for name, part in model.named_children() if any(True for _ in part.parameters())]
    places: dict[str, Any] = {name: "cpu" if i % 2 else 0 for i, name in enumerate(parts)}
    places |= {name: 0 for name, _ in model.named_parameters(recurse=False)}
    dispatch_model(model, places, main_device=0)


MANNERS: dict[str, Callable[[nn.Module], None]] = {
    "sequential": _sequential,
    "whole model": _whole,
    "device map": _mapped,
    "groups of blocks": _group("block_level", num_blocks_per_group=1),
    "groups of leaves, on a stream": _group("leaf_level", use_stream=True),
}


ORDERS = ("before the patch", "after the patch")
OFFLOADED = [("flux", manner, order) for manner in MANNERS for order in ORDERS]
OFFLOADED += [("llama", "sequential", "after the patch"), ("llama", "device map", ORDERS[0])]


@pytest.mark.parametrize(("family", "manner", "order"), OFFLOADED)
def test_offloaded(family: str, manner: str, order: str) -> None:
    # cases 36, 48
    reference, inputs = built(family)
    plain = run(reference, inputs)
    model, _ = built(family, "cpu")
    if order == "before the patch":
        MANNERS[manner](model)
    patch = sagepatch.apply(model, variant=RECIPE)
    if order == "after the patch":
        MANNERS[manner](model)
    for _ in range(2):
        assert 0 < error(run(model, inputs), plain) < 0.1
    assert all(layer.record.by_variant == {KERNEL: 2} for layer in patch.layers)
    assert not patch.replaced()
    patch.restore()
    assert torch.equal(run(model, inputs), plain)
    assert all(layer.record.calls == 2 for layer in patch.layers)


@pytest.mark.parametrize("way", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_a_pipeline_s_own_offloading(way: str) -> None:
    pipe = tiny_flux_pipeline().to(dtype=torch.bfloat16)
    getattr(pipe, way)()
    options = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "latent"}

    def draw() -> Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        latents: Tensor = pipe("a cat", generator=generator, **options).images
        return latents

    plain = draw()
    with sagepatch.apply(pipe, variant=RECIPE) as patch:
        assert 0 < error(draw(), plain) < 0.1
        assert all(layer.record.by_variant == {KERNEL: 2} for layer in patch.layers)
    assert torch.equal(draw(), plain)


def test_moved_after_the_patch() -> None:
    # The kernel is chosen for where the tensors are, at each call.
    model, inputs = built("flux", "cpu")
    on_cpu = run(model, inputs)
    there = placed(inputs, "cuda")
    patch = sagepatch.apply(model, variant=RECIPE)
    assert torch.equal(run(model, inputs), on_cpu)
    model.to("cuda")
    assert 0 < error(run(model, there).cpu(), on_cpu) < 0.1
    model.to("cpu")
    assert torch.equal(run(model, inputs), on_cpu)
    assert all(layer.record.by_variant == {EXACT: 2, KERNEL: 1} for layer in patch.layers)
    assert all("device" in reason for layer in patch.layers for reason in layer.record.fallbacks)


class Alone(nn.Module):
    """Attention and nothing else, over tensors that are there: other work has peaks of its own,
    which hide what attention takes.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("length", [4608, 100_000])
@pytest.mark.parametrize("kernel", [KERNEL, HOPPER])
def test_peak_memory_grows_by_the_quantised_copies_at_most(kernel: str, length: int) -> None:
    # case 68
    B, H, S, D = 1, 24, length, 128
    model = nn.Sequential(Alone())
    q, k, v = torch.randn(3, B, H, S, D, device="cuda", dtype=torch.bfloat16).unbind(0)

    def peak_bytes() -> int:
        """The most memory beyond what was there that one call took."""
        with torch.no_grad():
            model[0](q, k, v)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            model[0](q, k, v)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    unpatched = peak_bytes()
    with sagepatch.apply(model, variant=kernel) as patch:
        patched = peak_bytes()
        assert patch.layers[0].record.by_variant == {kernel: 2}
    # Codes of Q, K and V of a byte each; tiles are padded and have scales.
    copies, out = 3 * B * H * S * D, 2 * B * H * S * D
    print(f"{kernel}: peak {unpatched} bytes, patched {patched}, quantised copies {copies}")
    # What is measured is attention: without codes there would be nothing but the output.
    assert out <= unpatched < out + 0.5 * copies < patched
    assert patched <= unpatched + 1.05 * copies


def test_nothing_stays_allocated() -> None:
    # cases 39, 58, 68
    model, inputs = built("flux")
    run(model, inputs)
    with sagepatch.apply(model, variant=RECIPE):
        for _ in range(2):
            run(model, inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            run(model, inputs)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
