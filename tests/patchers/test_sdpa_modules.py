"""Modules that call SDPA themselves: found, patched one instance at a time, and given back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models.own_models import Block, CrossAttention, HandAttention, VisionAttention, own_vision
from models.transformers_models import first_output, tiny_bloom, tiny_falcon
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import sagepatch
from sagepatch.errors import NothingPatched
from sagepatch.patchers.sdpa import find

TESTS = Path(__file__).resolve().parent.parent


def _run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x)
    return out


def _patch(model: nn.Module, variant: str = "sage2_8") -> sagepatch.Patch:
    return sagepatch.apply(model, variant=variant, emulate=True)


def _close(out: Tensor, plain: Tensor) -> bool:
    return bool((out - plain).norm() < 0.1 * plain.norm()) and not torch.equal(out, plain)


def test_found_by_what_their_code_does() -> None:
    # case 37
    off = VisionAttention()
    off.fused_attn = False
    model = nn.ModuleDict(
        {
            "block": Block(),
            "cross": CrossAttention(),
            "hand": HandAttention(),
            "off": off,
            "mha": nn.MultiheadAttention(8, 2),
            "mlp": nn.Linear(4, 4),
        }
    )
    found = find(model, "vision")
    assert [(s.name, s.kind, s.patcher) for s in found.sites] == [
        ("vision.block.attn", "self", "sdpa"),
        ("vision.cross", "cross", "sdpa"),
    ]
    assert {left.name: left.reason for left in found.left} == {
        "vision.hand": "HandAttention computes its softmax by hand",
        "vision.off": "fused_attn is off, so it computes its softmax by hand",
        "vision.mha": "torch.nn.MultiheadAttention keeps its own fused path",
    }


def test_attention_by_the_forward_of_a_class_that_is_inherited_from() -> None:
    class Scaled(VisionAttention):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            return 0.5 * super().forward(x, attn_mask)

    class Twice(Scaled):
        def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            return 2 * super().forward(x, attn_mask)

    torch.manual_seed(0)
    model, x = nn.Sequential(Scaled(), Twice()).eval(), torch.randn(2, 50, 64)
    plain = _run(model, x)
    with _patch(model) as patch:
        assert _close(_run(model, x), plain)
        assert [layer.record.by_variant.total() for layer in patch.layers] == [1, 1]
    assert torch.equal(_run(model, x), plain)


def test_attention_in_a_method_that_takes_the_place_of_another_file_s() -> None:
    class Sharper(CrossAttention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
            return mixed.transpose(1, 2).flatten(2)

    class Normed(CrossAttention):
        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            q, k, v = (t.unflatten(2, (4, 16)).transpose(1, 2) for t in (x, context, context))
            return self.attend(q, k, v)

    for owner in (Sharper, Normed):
        torch.manual_seed(0)
        model, x = owner().eval(), torch.randn(2, 50, 64)
        with torch.no_grad():
            plain = model(x, x)
            with _patch(model) as patch:
                assert _close(model(x, x), plain)
                assert patch.layers[0].record.by_variant.total() == 1
            assert torch.equal(model(x, x), plain)


def test_a_model_without_attention_is_refused() -> None:
    # case 37
    with pytest.raises(NothingPatched):
        sagepatch.apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_each_block_runs_its_own_layer() -> None:
    model, x = own_vision()
    plain = _run(model, x)
    patch = _patch(model)
    assert _close(_run(model, x), plain)
    assert [layer.record.by_variant for layer in patch.layers] == [{"emulated.sage2_8": 1}] * 3
    patch.restore()
    assert torch.equal(_run(model, x), plain)


def test_cross_attention_in_a_method_of_its_own() -> None:
    torch.manual_seed(0)
    model, x, context = CrossAttention().eval(), torch.randn(2, 19, 64), torch.randn(2, 7, 64)
    with torch.no_grad():
        plain = model(x, context)
        with _patch(model) as patch:
            assert _close(model(x, context), plain)
    assert patch.layers[0].kind == "cross"


@pytest.mark.parametrize("kept", ["restored", "left by an error", "a hundred times"])
def test_restore_leaves_nothing(kept: str) -> None:
    # case 33
    model, x = own_vision()
    plain = _run(model, x)
    before = [set(module.__dict__) for module in model.modules()]
    keys = list(model.state_dict())
    if kept == "left by an error":
        model[1].register_forward_hook(_fail)
        with pytest.raises(MemoryError), _patch(model):
            _run(model, x)
        model[1]._forward_hooks.clear()
    else:
        for _ in range(100 if kept == "a hundred times" else 1):
            patch = _patch(model)
            assert list(model.state_dict()) == keys
            patch.restore()
        patch.restore()
    assert [set(module.__dict__) for module in model.modules()] == before
    assert torch.equal(_run(model, x), plain)


def _fail(*_: object) -> None:
    raise MemoryError("as if the GPU were full")


@pytest.mark.parametrize("first", ["hooks first", "patch first"])
@pytest.mark.parametrize("gone_first", ["hooks go first", "patch goes first"])
def test_with_accelerate_hooks(first: str, gone_first: str) -> None:
    model, x = own_vision()
    plain = _run(model, x)
    if first == "hooks first":
        _hook(model)
        patch = _patch(model)
    else:
        patch = _patch(model)
        _hook(model)
    assert _close(_run(model, x), plain)
    assert patch.layers[0].record.calls == 1
    if gone_first == "hooks go first":
        remove_hook_from_module(model, recurse=True)
        assert _close(_run(model, x), plain)
        assert patch.layers[0].record.calls == 2
        patch.restore()
    else:
        patch.restore()
        assert torch.equal(_run(model, x), plain)
        assert patch.layers[0].record.calls == 1
        remove_hook_from_module(model, recurse=True)
    assert torch.equal(_run(model, x), plain)
    # accelerate leaves a bound method behind, with or without us.
    assert all(m.forward.__func__ is type(m).forward for m in model.modules())


def _hook(model: nn.Module) -> None:
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook())


@pytest.mark.parametrize("first", ["hooks first", "patch first"])
def test_with_diffusers_hooks(first: str) -> None:
    from diffusers.hooks import HookRegistry
    from diffusers.hooks import ModelHook as DiffusersHook

    model, x = own_vision(2)
    plain = _run(model, x)
    before = [set(vars(block.attn)) for block in model]

    def hook() -> None:
        for block in model:
            HookRegistry.check_if_exists_or_initialize(block.attn).register_hook(
                DiffusersHook(), "test"
            )

    if first == "hooks first":
        hook()
        patch = _patch(model)
    else:
        patch = _patch(model)
        hook()
    assert _close(_run(model, x), plain)
    assert [swap.replaced_by() for swap in patch._swaps] == [None, None]
    patch.restore()
    assert torch.equal(_run(model, x), plain)
    assert [layer.record.calls for layer in patch.layers] == [1, 1]
    for block in model:
        block.attn._diffusers_hook.remove_hook("test")
    assert torch.equal(_run(model, x), plain)
    # diffusers leaves its registry and a forward behind, with or without us.
    left = {"_diffusers_hook", "forward"}
    assert [set(vars(block.attn)) - left for block in model] == before


def test_a_forward_of_its_own_is_kept() -> None:
    model, x = own_vision(1)
    attention = model[0].attn
    own = attention.forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * own(x)

    attention.forward = doubled
    plain = _run(model, x)
    with _patch(model):
        assert _close(_run(model, x), plain)
    assert attention.forward is doubled


def test_a_newer_forward_stays() -> None:
    # case 36: what came after us is not put back over, and the swap says so
    model, x = own_vision(1)
    plain = _run(model, x)
    patch = _patch(model)

    def newer(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    model[0].attn.forward = newer
    assert [swap.replaced_by() for swap in patch._swaps] == [newer.__qualname__]
    patch.restore()
    assert model[0].attn.forward is newer
    assert not torch.equal(_run(model, x), plain)


def test_a_deep_copy_is_unpatched_and_on_its_own() -> None:
    # case 40
    model, x = own_vision()
    plain = _run(model, x)
    patch = _patch(model)
    twin = copy.deepcopy(model)
    assert torch.equal(_run(twin, x), plain)
    assert patch.layers[0].record.calls == 0
    with torch.no_grad():
        twin[0].attn.proj.bias += 1
    assert not torch.equal(_run(twin, x), plain)
    assert _close(_run(model, x), plain)


def test_a_pickle_needs_no_sagepatch(tmp_path: Path) -> None:
    # case 40
    model, x = own_vision()
    plain = _run(model, x)
    _patch(model)
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, x, plain)))
    code = (
        "import pickle, sys, torch; sys.modules['sagepatch'] = None\n"
        "model, x, plain = pickle.load(open(sys.argv[1], 'rb'))\n"
        "with torch.no_grad(): print(torch.equal(model(x), plain))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pickle")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(TESTS), "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.strip() == "True"


def test_training_and_dropout_run_the_original() -> None:
    # case 46
    model, x = own_vision(2)
    model.train()
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    patch = _patch(model)
    model(x).square().mean().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    assert patch.layers[0].record.fallbacks.total() == 1


def test_threads_do_not_mix() -> None:
    # case 50
    model, _ = own_vision(2)
    _patch(model, "sage1_b")
    inputs = [torch.randn(1, 11 + i, 64) for i in range(8)]
    alone = [_run(model, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            if not torch.equal(_run(model, inputs[i]), alone[i]):
                wrong.append(i)

    other, x = own_vision(1)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with _patch(other):
            _run(other, x)
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("how", ["block by block", "whole"])
def test_twelve_compiled_blocks_are_one_graph(how: str) -> None:
    def graphs(model: nn.Module, x: Tensor) -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        if how == "whole":
            compiled = [torch.compile(model, backend=counter, fullgraph=True)]
        else:
            compiled = [torch.compile(b, backend=counter, fullgraph=True) for b in model]
        for _ in range(2):
            y = x
            for block in compiled:
                y = _run(block, y)
        return counter.frame_count

    model, x = own_vision(12)
    unpatched = graphs(model, x)
    patch = _patch(model)
    assert graphs(model, x) == unpatched == 1
    assert [layer.record.calls for layer in patch.layers] == [2] * 12


def test_compiled_equals_eager() -> None:
    model, x = own_vision(2)
    patch = _patch(model, "sage1_b")
    eager = _run(model, x)
    torch._dynamo.reset()
    compiled = _run(torch.compile(model, backend="aot_eager", fullgraph=True), x)
    assert torch.equal(compiled, eager)
    assert patch.layers[1].record.by_variant == {"emulated.sage1_b": 2}


@pytest.mark.parametrize("alibi", [False, True], ids=["rotary", "alibi"])
def test_falcon_calls_sdpa_itself(alibi: bool) -> None:
    model, inputs = tiny_falcon(alibi=alibi)
    plain = first_output(model, inputs)
    patch = _patch(model)
    assert _close(first_output(model, inputs), plain)
    assert [layer.record.by_variant for layer in patch.layers] == [{"emulated.sage2_8": 1}] * 2
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)


def test_eager_falcon_is_left() -> None:
    left = find(tiny_falcon(attn_implementation="eager")[0], "").left
    assert "eager" in left[0].reason


def test_bloom_is_left() -> None:
    # case 37
    with pytest.raises(NothingPatched, match="by hand"):
        sagepatch.apply(tiny_bloom()[0])
