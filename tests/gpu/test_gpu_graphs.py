"""CUDA graphs of patched models: captured by hand and by `reduce-overhead`, replayed on new inputs,
bit for bit what the model gives without a graph.
"""

from __future__ import annotations

import pytest
import torch
from gpu.placed import BUILDS, HOPPER, KERNEL, RECIPE, Inputs, built, error, renewed, run
from torch import Tensor, nn

import sagepatch
from sagepatch.errors import MachineError


def captured(model: nn.Module, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one forward, and the tensor that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(model, inputs)
    return graph, out


def fill(inputs: Inputs, new: Inputs) -> None:
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value.copy_(new[name])


@pytest.mark.parametrize(
    ("family", "kernel"), [*((family, KERNEL) for family in BUILDS), ("flux", HOPPER)]
)
def test_a_replay_on_new_inputs_is_the_eager_model_bit_for_bit(family: str, kernel: str) -> None:
    model, inputs = built(family)
    plain = run(model, inputs)
    patch = sagepatch.apply(model, variant=kernel)
    assert 0 < error(run(model, inputs), plain) < 0.1
    graph, out = captured(model, inputs)
    for seed in (1, 2):
        new = renewed(inputs, seed)
        fill(inputs, new)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run(model, new))
    assert all(set(layer.record.by_variant) == {kernel} for layer in patch.layers)


def test_a_graph_captured_before_the_restore_keeps_its_kernels() -> None:
    # A graph is launches with addresses: nothing that a patch owned may be gone from under it.
    model, inputs = built("flux")
    patch = sagepatch.apply(model, variant=RECIPE)
    graph, out = captured(model, inputs)
    graph.replay()
    before = out.clone()
    patch.restore()
    del patch
    torch.cuda.empty_cache()
    graph.replay()
    assert torch.equal(out, before)


def test_a_layer_that_still_calibrates_refuses_a_capture() -> None:
    model, inputs = built("flux")
    patch = sagepatch.apply(model)
    with pytest.raises(MachineError, match="cannot be captured in a CUDA graph"):
        captured(model, inputs)
    torch.cuda.synchronize()
    patch.restore()


def test_reduce_overhead_replays_the_eager_model_bit_for_bit() -> None:
    # Layers that a compiler cannot round otherwise: products, one addition, our op.
    model, inputs = built("stack")
    patch = sagepatch.apply(model, variant=RECIPE)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    # The first call warms up, the second records, those after it replay.
    for seed in range(4):
        new = renewed(inputs, seed)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            out = compiled(**new).clone()
        assert torch.equal(out, run(model, new)), seed
    assert all(set(layer.record.by_variant) == {KERNEL} for layer in patch.layers)


def test_reduce_overhead_of_blocks() -> None:
    model, inputs = built("flux")
    plain = run(model, inputs)
    sagepatch.apply(model, variant=RECIPE)
    eager = run(model, inputs)
    model.compile_repeated_blocks(mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = run(model, inputs).clone()
        # The compiler keeps what eager mode rounds between operations.
        assert error(out, eager) < error(eager, plain) + 0.01
