"""torch.compile and autocast over patched models on a GPU, with the kernels themselves."""

from __future__ import annotations

import pytest
import torch
from gpu.placed import KERNEL, RECIPE, built, error, run

import sagepatch

# Inductor keeps in FP32 what eager mode rounds to bf16 between operations.
ROUNDING = 0.02


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
def test_blocks_compile_whole_and_once_a_kind(order: str) -> None:
    from torch._dynamo.utils import counters

    model, inputs = built("flux")
    model.compile_repeated_blocks(fullgraph=True)
    counters.clear()
    plain = run(model, inputs)
    unpatched = counters["stats"]["unique_graphs"]
    if order == "after the patch":
        torch._dynamo.reset()
        model, inputs = built("flux")
    counters.clear()
    patch = sagepatch.apply(model, variant=RECIPE)
    if order == "after the patch":
        model.compile_repeated_blocks(fullgraph=True)
    out = run(model, inputs)
    run(model, inputs)
    assert 1 <= counters["stats"]["unique_graphs"] <= unpatched
    with torch.compiler.set_stance("force_eager"):
        eager = run(model, inputs)
    assert error(out, eager) < ROUNDING
    assert 0 < error(out, plain) < 0.1
    assert all(layer.record.by_variant == {KERNEL: 3} for layer in patch.layers)


def test_a_language_model_compiles_whole_for_any_length() -> None:
    # In FP32, as a compiler keeps what eager mode rounds to bf16.
    model, _ = built("llama", dtype=torch.float32)
    patch = sagepatch.apply(model, variant=RECIPE)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (40, 57):
        ids = torch.arange(length, device="cuda")[None] % 90 + 3
        new = {"input_ids": ids, "use_cache": False}
        assert error(run(compiled, new), run(model, new)) < ROUNDING
    assert all(layer.record.by_variant == {KERNEL: 4} for layer in patch.layers)


@pytest.mark.parametrize("family", ["flux", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_of_an_fp32_model(family: str, dtype: torch.dtype) -> None:
    # case 23
    model, inputs = built(family, dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        plain = run(model, inputs)
        patch = sagepatch.apply(model, variant=RECIPE)
        out = run(model, inputs)
    assert out.dtype == plain.dtype
    assert 0 < error(out, plain) < 0.1
    assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
    if family == "llama":
        name = "bf16" if dtype is torch.bfloat16 else "fp16"
        assert {spec.dtype for layer in patch.layers for spec in layer.record.specs} == {name}


def test_fp32_without_autocast_is_quantised_where_it_is_asked_for() -> None:
    model, inputs = built("flux", dtype=torch.float32)
    plain = run(model, inputs)
    with sagepatch.apply(model) as patch:
        for _ in range(9):
            assert torch.equal(run(model, inputs), plain)
        assert all("fp32 stays exact" in " ".join(layer.record.notes) for layer in patch.layers)
    with sagepatch.apply(model, variant=RECIPE) as patch:
        assert 0 < error(run(model, inputs), plain) < 0.1
        assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
