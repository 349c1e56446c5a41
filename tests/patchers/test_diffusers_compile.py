"""Patched diffusers models under torch.compile: as many graphs as unpatched, right counts by layer.

Blocks are compiled one by one (the way diffusers compiles repeated blocks) and whole, fullgraph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models.diffusers_models import (
    Inputs,
    forward,
    tiny_cogvideox,
    tiny_flux,
    tiny_hunyuan_video,
    tiny_pixart,
    tiny_qwen_image,
    tiny_sd3,
    tiny_wan,
)
from models.patching import patch_all
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from sagepatch.dispatch import Request

VARIANT = "emulated.sage2_8"
# 12 equal blocks: more than the 8 recompiles after which Dynamo gives a function up.
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "flux": lambda: tiny_flux(double=12, single=1),
    "wan": lambda: tiny_wan(layers=12),
    "qwen_image": lambda: tiny_qwen_image(layers=12),
    "hunyuan_video": lambda: tiny_hunyuan_video(layers=12),
    "sd3": lambda: tiny_sd3(layers=12),
    "cogvideox": lambda: tiny_cogvideox(layers=12),
    "pixart": lambda: tiny_pixart(layers=12),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks_of(model: nn.Module) -> nn.ModuleList:
    blocks: nn.ModuleList = getattr(model, "transformer_blocks", None) or model.blocks
    assert len(blocks) == 12
    return blocks


def run_compiled(model: nn.Module, inputs: Inputs, whole: bool) -> tuple[Tensor, int]:
    """Output and number of graphs of one forward, all code compiled afresh."""
    torch._dynamo.reset()
    counter = CompileCounter()
    if whole:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        return forward(compiled, inputs), counter.frame_count
    for block in blocks_of(model):
        block.compile(backend=counter, fullgraph=True)
    out = forward(model, inputs)
    for block in blocks_of(model):
        block._compiled_call_impl = None
    return out, counter.frame_count


@pytest.mark.parametrize(
    ("family", "whole"),
    [pytest.param(f, False, id=f"{f}-blocks") for f in ("flux", "sd3")]
    + [pytest.param("wan", True, id="wan-whole")]
    + [
        pytest.param(f, w, id=f"{f}-{'whole' if w else 'blocks'}", marks=pytest.mark.slow)
        for f in FAMILIES
        for w in (False, True)
        if (f, w) not in (("flux", False), ("sd3", False), ("wan", True))
    ],
)
def test_as_many_graphs_as_unpatched(family: str, whole: bool) -> None:
    model, inputs = FAMILIES[family]()
    reference, graphs = run_compiled(model, inputs, whole)
    assert graphs >= 1
    with patch_all(model, VARIANT) as patched:
        eager = forward(model, inputs)
        out, ours = run_compiled(model, inputs, whole)
        assert ours == graphs
        # Every layer found its own record: no entry of one layer used for all.
        assert patched.calls() == [2] * len(patched.layers)
        assert set(patched.ran()) == {VARIANT}
        torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, reference)


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=pytest.mark.slow)])
def test_layers_with_kernels_of_their_own_share_one_graph(family: str) -> None:
    model, inputs = FAMILIES[family]()
    with patch_all(model, "exact") as patched:
        reference, graphs = run_compiled(model, inputs, False)
        for number, layer in enumerate(patched.layers.values()):
            layer.run_with(Request(VARIANT if number % 2 else "exact", True), "test")
        out, ours = run_compiled(model, inputs, False)
        kernels = [set(layer.record.by_variant) for layer in patched.layers.values()]
    assert ours == graphs
    assert kernels[0] == {"sdpa.exact"}
    assert kernels[1] == {"sdpa.exact", VARIANT}
    assert not torch.equal(out, reference)


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=pytest.mark.slow)])
def test_patched_and_restored_after_compiling(family: str) -> None:
    model, inputs = FAMILIES[family]()
    counter = CompileCounter()
    for block in blocks_of(model):
        block.compile(backend=counter, fullgraph=True)
    reference = forward(model, inputs)
    unpatched = counter.frame_count
    with patch_all(model, VARIANT) as patched:
        assert not torch.equal(forward(model, inputs), reference)
        assert set(patched.calls()) == {1}
    assert torch.equal(forward(model, inputs), reference)
    assert set(patched.calls()) == {1}
    assert counter.frame_count == 2 * unpatched  # the unpatched graphs are still there


def longer(family: str, inputs: Inputs, tokens: int) -> Inputs:
    """The same call with text of another length."""
    inputs = dict(inputs)
    B, _, width = inputs["encoder_hidden_states"].shape
    generator = torch.Generator().manual_seed(tokens)
    inputs["encoder_hidden_states"] = torch.randn(B, tokens, width, generator=generator)
    if family == "flux":
        inputs["txt_ids"] = torch.zeros(tokens, 3)
    return inputs


@pytest.mark.parametrize("family", ["flux", "sd3", pytest.param("wan", marks=pytest.mark.slow)])
def test_one_dynamic_graph_serves_all_lengths(family: str) -> None:
    model, inputs = {
        "flux": lambda: tiny_flux(double=1, single=1),
        "sd3": lambda: tiny_sd3(layers=2),
        "wan": lambda: tiny_wan(layers=1),
    }[family]()

    def graphs() -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        outs = [forward(compiled, longer(family, inputs, n)) for n in (7, 13, 20)]
        return outs, counter.frame_count

    _, unpatched = graphs()
    with patch_all(model, VARIANT) as patched:
        outs, ours = graphs()
        assert ours == unpatched
        assert set(patched.calls()) == {3}
        for out, tokens in zip(outs, (7, 13, 20), strict=True):
            eager = forward(model, longer(family, inputs, tokens))
            torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=pytest.mark.slow)])
def test_through_aot_autograd(family: str) -> None:
    model, inputs = FAMILIES[family]()
    with patch_all(model, VARIANT) as patched:
        eager = forward(model, inputs)
        for block in blocks_of(model):
            block.compile(backend="aot_eager", fullgraph=True)
        out = forward(model, inputs)
        assert patched.calls() == [2] * len(patched.layers)
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)


def test_cosmos_passes_no_backend_and_compiles() -> None:
    from diffusers import CosmosTransformer3DModel

    torch.manual_seed(0)
    model = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=12,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    ).eval()
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(1, 4, 1, 16, 16),
        "timestep": torch.tensor([5.0]),
        "encoder_hidden_states": torch.randn(1, 12, 32),
    }
    reference, graphs = run_compiled(model, inputs, False)
    with patch_all(model, VARIANT) as patched:
        eager = forward(model, inputs)
        out, ours = run_compiled(model, inputs, False)
        assert ours == graphs
        assert patched.calls() == [2] * 24
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
    assert not torch.equal(out, reference)


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=pytest.mark.slow)])
def test_lora_added_and_deleted_under_a_compiled_patched_model(family: str) -> None:  # case 39
    from peft import LoraConfig

    build = {"flux": tiny_flux, "sd3": tiny_sd3}[family]
    model, inputs = build()
    with patch_all(model, VARIANT) as patched:
        for block in model.transformer_blocks:
            block.compile(backend="eager")
        first = forward(model, inputs)
        torch.manual_seed(1)
        targets = ["to_q", "to_k", "to_v"]
        model.add_adapter(
            LoraConfig(r=2, target_modules=targets, init_lora_weights=False), adapter_name="a"
        )
        second = forward(model, inputs)
        model.delete_adapters("a")
        third = forward(model, inputs)
        assert not patched.replaced()
        assert patched.calls() == [3] * len(patched.layers)
    assert not torch.allclose(second, first, rtol=1e-3, atol=1e-3)
    assert torch.equal(third, first)


@pytest.mark.parametrize("family", ["flux", pytest.param("sd3", marks=pytest.mark.slow)])
def test_graphs_that_break_inside_a_processor_are_no_other_model_s(family: str) -> None:
    @torch.compiler.disable
    def looked_at(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        # As offloading does it: the graph breaks at each projection.
        return out

    build = {"flux": lambda: tiny_flux(1, 1), "sd3": lambda: tiny_sd3(1)}[family]
    (model, inputs), (other, _) = build(), build()
    plain = forward(model, inputs)
    for one in (model, other):
        for block in one.transformer_blocks:
            block.attn.to_q.register_forward_hook(looked_at)
            block.compile(backend="eager")
    with patch_all(model, "sdpa.exact") as patched:
        assert torch.equal(forward(model, inputs), plain)
        # Unpatched, it found what was compiled for the patched one, and pieces of it missing.
        assert torch.equal(forward(other, inputs), plain)
        assert torch.equal(forward(model, inputs), plain)
        assert patched.calls() == [2] * len(patched.layers)
    assert torch.equal(forward(model, inputs), plain)
