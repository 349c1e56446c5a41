"""Patched models under what looks at operations without running them, or writes them down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.stacks import stack, tokens
from models.transformers_models import ids, tiny_llama
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sagepatch
from sagepatch.patchers.sdpa_redirect import SUBCLASS

VARIANTS = ["exact", "emulated.sage1_b"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("build", [stack, lambda: tiny_llama()[0]], ids=["sdpa", "transformers"])
def test_fake_tensors_have_the_shapes_of_the_plain_model(
    build: Callable[[], nn.Module], variant: str
) -> None:
    # The layer's handle is a real tensor, whose number no mode may ask for.
    mode = FakeTensorMode()
    with mode:
        model = build()
        x = ids() if hasattr(model, "lm_head") else tokens()
    with torch.no_grad():
        with mode:
            plain = model(x)
        patch = sagepatch.apply(model, variant=variant, emulate=True)
        with mode:
            out = model(x)
    shapes = [(out if isinstance(out, Tensor) else out.logits).shape for out in (out, plain)]
    assert shapes[0] == shapes[1]
    assert all(layer.record.fallbacks == {SUBCLASS: 1} for layer in patch.layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_symbolic_trace_is_the_plain_model_s(variant: str) -> None:
    model = stack()
    with torch.no_grad():
        plain = torch.fx.symbolic_trace(model)(tokens())
        sagepatch.apply(model, variant=variant, emulate=True)
        assert torch.equal(torch.fx.symbolic_trace(model)(tokens()), plain)


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_an_exported_program_runs_the_layers_kernels(strict: bool) -> None:
    model, x = stack(), tokens()
    with torch.no_grad():
        patch = sagepatch.apply(model, variant="emulated.sage1_b", emulate=True)
        patched = model(x)
        program = torch.export.export(model, (x,), strict=strict).module()
        assert torch.equal(program(x), patched)
        assert all(layer.record.by_variant == {"emulated.sage1_b": 2} for layer in patch.layers)
        patch.restore()
        # The handle outlives its patch, and means exact attention then.
        del patch
        torch.testing.assert_close(program(x), model(x))


def test_a_recorded_graph_holds_no_handle() -> None:
    # A mode that records would take our look at the number for an operation of the model's.
    model, x = stack(1), tokens()
    with torch.no_grad():
        plain = make_fx(model)(x)
        sagepatch.apply(model, variant="exact")
        traced = make_fx(model)(x)
    names = [[str(node.target) for node in graph.graph.nodes] for graph in (traced, plain)]
    assert names[0] == names[1]
