"""torch.compile over patched models of both libraries: whole and by region, before and after the
patch, under autocast and in inference mode, with a static cache: as many graphs as unpatched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from models.diffusers_models import tiny_flux, tiny_qwen_image, tiny_wan
from models.transformers_models import first_output, ids, tiny_bert, tiny_falcon, tiny_llama
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers_tiny import Tiny, installed

import sagepatch

RECIPE = "sage1_b_f32"
KERNEL = f"emulated.{RECIPE}"
Built = tuple[nn.Module, dict[str, Any]]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def slow(value: Any) -> Any:
    """The same as a case of the long matrix."""
    return pytest.param(value, marks=pytest.mark.slow)


def _patch(model: nn.Module) -> sagepatch.Patch:
    return sagepatch.apply(model, variant=RECIPE, emulate=True)


def _near(out: Tensor, eager: Tensor) -> bool:
    return torch.allclose(out, eager, rtol=1e-4, atol=1e-5)


# Whole models

LONG = (
    *("bart", "beit", "bert", "clip", "deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_oss"),
    *(
        "llama4_text",
        "modernbert",
        "phi3",
        "qwen2_5_vl_vision",
        "swin",
        "t5",
        "videomae",
        "whisper",
    ),
)


def _whole(tiny: Tiny) -> tuple[list[Tensor], int]:
    """Outputs of one compiled forward, and how many graphs it took."""
    torch._dynamo.reset()
    counter = CompileCounter()
    forward = tiny.model.forward
    tiny.model.forward = torch.compile(forward, backend=counter)
    try:
        return tiny.outputs(), counter.frame_count
    finally:
        del tiny.model.forward


@pytest.mark.parametrize("model_type", ["qwen3", *map(slow, LONG)])
def test_a_family_compiles_into_as_many_graphs_as_unpatched(model_type: str) -> None:
    # case 51
    tiny = installed(model_type, reached=True)
    _, unpatched = _whole(tiny)
    patch = _patch(tiny.model)
    eager = tiny.outputs()
    calls = [layer.record.calls for layer in patch.layers]
    compiled, graphs = _whole(tiny)
    assert graphs == unpatched >= 1
    assert all(_near(a, b) for a, b in zip(compiled, eager, strict=True))
    assert [layer.record.calls for layer in patch.layers] == [2 * n for n in calls]


# Regions

REGIONS: dict[str, Callable[[], Built]] = {
    "flux": lambda: tiny_flux(double=3, single=3),
    "wan": lambda: tiny_wan(layers=3),
    "qwen_image": lambda: tiny_qwen_image(layers=3),
}


def _regional(model: Any, counter: CompileCounter) -> None:
    model.compile_repeated_blocks(backend=counter, fullgraph=True)


@pytest.mark.parametrize("order", [slow("before the patch"), "after the patch"])
@pytest.mark.parametrize("family", ["flux", *map(slow, ("wan", "qwen_image"))])
def test_regional_compilation(family: str, order: str) -> None:
    # case 53: one graph a kind of block, however many blocks there are
    model, inputs = REGIONS[family]()
    counter = CompileCounter()
    _regional(model, counter)
    first_output(model, inputs)
    unpatched = counter.frame_count
    torch._dynamo.reset()
    model, inputs = REGIONS[family]()
    ours = CompileCounter()
    if order == "before the patch":
        _regional(model, ours)
        patch = _patch(model)
    else:
        patch = _patch(model)
        _regional(model, ours)
    out = first_output(model, inputs)
    assert ours.frame_count == unpatched
    assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
    first_output(model, inputs)
    assert ours.frame_count == unpatched
    with torch.compiler.set_stance("force_eager"):
        assert _near(out, first_output(model, inputs))


def test_patched_restored_and_patched_again_under_one_compilation() -> None:
    # Both kinds of graph stay in Dynamo's cache: no new one for a patch that was there before.
    model, inputs = tiny_bert(4)
    counter = CompileCounter()
    for block in model.encoder.layer:
        block.compile(backend=counter, fullgraph=True)
    plain, seen = first_output(model, inputs), []
    for _ in range(3):
        with _patch(model) as patch:
            assert not torch.equal(first_output(model, inputs), plain)
            assert all(layer.record.by_variant == {KERNEL: 1} for layer in patch.layers)
        assert torch.equal(first_output(model, inputs), plain)
        seen.append(counter.frame_count)
    assert seen == [2, 2, 2]


def test_a_layer_that_calibrates_and_locks_keeps_its_graph() -> None:
    model, inputs = tiny_falcon()
    counter = CompileCounter()
    patch = sagepatch.apply(model, emulate=True)
    for block in model.transformer.h:
        block.compile(backend=counter, fullgraph=True)
    options = inputs | {"use_cache": False}
    for _ in range(9):
        first_output(model, options)
    assert patch.locked
    assert counter.frame_count == 1
    assert all(layer.record.calls == 9 for layer in patch.layers)
    assert all(layer.runs != "sdpa.exact" for layer in patch.layers)


# Modes


def _bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": _bf16,
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "falcon", slow("flux")])
def test_autocast_and_inference_mode(family: str, compiled: bool, mode: str) -> None:
    # case 23
    model, inputs = {
        "llama": tiny_llama,
        "falcon": tiny_falcon,
        "flux": lambda: tiny_flux(double=1, single=1),
    }[family]()
    if family != "flux":
        inputs = inputs | {"use_cache": False}
    with MODES[mode]():
        plain = first_output(model, inputs)
        patch = _patch(model)
        eager = first_output(model, inputs)
        if compiled:
            # Without gradients, as Dynamo itself switches inference mode off.
            model.forward = torch.compile(model.forward, backend="eager")
            out = first_output(model, inputs)
            scale = eager.float().norm()
            assert (out.float() - eager.float()).norm() < (
                0.02 if mode == "autocast" else 1e-5
            ) * scale
    assert eager.dtype == plain.dtype
    assert 0 < (eager - plain).float().norm() < 0.1 * plain.float().norm()
    want = 2 if compiled else 1
    assert all(layer.record.by_variant == {KERNEL: want} for layer in patch.layers)
    if mode == "autocast" and family == "llama":
        assert {spec.dtype for spec in patch.layers[0].record.specs} == {"bf16"}


@pytest.mark.slow
def test_compiled_training_is_the_model_s_own() -> None:
    # case 46
    gradients = []
    for patched in (False, True):
        torch._dynamo.reset()
        model, inputs = tiny_bert()
        if patched:
            _patch(model)
        compiled = torch.compile(model, backend="aot_eager")
        compiled(**inputs).last_hidden_state.square().mean().backward()
        named = model.named_parameters()
        gradients.append({n: p.grad for n, p in named if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[1][n], g, atol=1e-6) for n, g in gradients[0].items())


# Generation


def _generated(model: nn.Module, counter: CompileCounter) -> tuple[Tensor, int]:
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids(length=9), **options, cache_implementation="static")
    return tokens, counter.frame_count


@pytest.mark.slow
def test_a_static_cache_takes_as_many_graphs_as_unpatched() -> None:
    runs = []
    for variant in (None, "exact", RECIPE):
        torch._dynamo.reset()
        model, _ = tiny_llama(1)
        patch = None if variant is None else sagepatch.apply(model, variant=variant, emulate=True)
        counter = CompileCounter()
        model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
        runs.append(_generated(model, counter))
        if variant == RECIPE:
            assert patch is not None
            for layer in patch.layers:
                assert layer.record.by_variant == {KERNEL: 1, "sdpa.exact": 5}
    assert torch.equal(runs[1][0], runs[0][0])
    assert runs[0][1] == runs[1][1] == runs[2][1]


# Inductor


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "dynamic"), [("llama", True), ("falcon", False), ("flux", False)]
)
def test_inductor(family: str, dynamic: bool) -> None:
    # case 53: generated code reads our output with the strides that the fake promised
    model, inputs = {
        "llama": tiny_llama,
        "falcon": tiny_falcon,
        "flux": lambda: tiny_flux(double=1, single=1),
    }[family]()
    if family in ("llama", "falcon"):
        inputs = inputs | {"use_cache": False}
    _patch(model)
    eager = first_output(model, inputs)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    assert torch.allclose(first_output(compiled, inputs), eager, rtol=1e-3, atol=1e-4)
