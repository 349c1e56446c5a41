"""Patched transformers models under torch.compile: as many graphs as unpatched, right layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.transformers_models import (
    first_output,
    tiny_bert,
    tiny_gemma2,
    tiny_gpt_oss,
    tiny_llama,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import sagepatch


def _blocks(model: nn.Module) -> nn.ModuleList:
    blocks = model.model.layers if hasattr(model, "model") else model.encoder.layer
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _graphs(build: Any, how: str, patched: bool) -> tuple[int, list[int]]:
    """Compiled graphs of twelve equal blocks after three forwards, and the calls of each layer."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model, inputs = build()
    patch = sagepatch.apply(model, variant="sage2_8", emulate=True) if patched else None
    if how == "whole":
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    else:
        for block in _blocks(model):
            block.compile(backend=counter, fullgraph=True)
    for _ in range(3):
        first_output(model, inputs)
    calls = [] if patch is None else [layer.record.calls for layer in patch.layers]
    return counter.frame_count, calls


BUILDS = {
    "llama": lambda: _uncached(*tiny_llama(12)),
    "bert": lambda: tiny_bert(12),
}


def _uncached(model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model, inputs | {"use_cache": False}


@pytest.mark.parametrize("how", ["block by block", "whole"])
@pytest.mark.parametrize("family", BUILDS)
def test_twelve_blocks_make_as_many_graphs_as_unpatched(family: str, how: str) -> None:
    unpatched, _ = _graphs(BUILDS[family], how, patched=False)
    patched, calls = _graphs(BUILDS[family], how, patched=True)
    assert patched == unpatched == 1
    assert calls == [3] * 12


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma2, tiny_gpt_oss, tiny_bert])
def test_compiled_equals_eager(build: Any) -> None:
    model, inputs = _uncached(*build()) if build is not tiny_bert else build()
    sagepatch.apply(model, variant="sage1_b", emulate=True)
    eager = first_output(model, inputs)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.allclose(first_output(model, inputs), eager, atol=1e-5)


def test_other_lengths_reuse_a_dynamic_graph() -> None:
    model, _ = tiny_llama()
    sagepatch.apply(model, variant="sage2_8", emulate=True)
    torch._dynamo.reset()
    counter = CompileCounter()
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True, dynamic=True)
    for length in (17, 23, 40):
        tokens: Tensor = torch.arange(3, 3 + length)[None]
        first_output(model, {"input_ids": tokens, "use_cache": False})
    assert counter.frame_count == 1


def test_restored_models_compile_as_before() -> None:
    model, inputs = tiny_bert()
    plain = first_output(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with sagepatch.apply(model, variant="sage2_8", emulate=True) as patch:
        assert not torch.equal(first_output(compiled, inputs), plain)
    assert torch.equal(first_output(compiled, inputs), plain)
    assert patch.layers[0].record.calls == 1
