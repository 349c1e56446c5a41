"""Modules patched again after somebody wrapped their forward: once is enough, and undo is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry, ModelHook
from models.patching import patch_all
from models.stacks import Block, stack, tokens
from torch import Tensor

import sagepatch
from sagepatch.patchers import sdpa

VARIANT = "emulated.sage2_8"


def diffusers_hook(block: Block) -> None:
    HookRegistry.check_if_exists_or_initialize(block).register_hook(ModelHook(), "nothing")


def accelerate_hook(block: Block) -> None:
    add_hook_to_module(block, AlignDevicesHook(execution_device="cpu"))


def closure(block: Block) -> None:
    """A wrapper that does not say what it wraps."""
    under = block.forward
    block.forward = lambda x: under(x)


WRAPPERS: dict[str, Callable[[Block], None]] = {
    "nothing": lambda block: None,
    "diffusers' hook": diffusers_hook,
    "accelerate's hook": accelerate_hook,
    "closure": closure,
}


def out(model: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(x)
    return made


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("restored", [False, True], ids=["at once", "after a restore"])
def test_apply_again_runs_each_layer_once(wrapper: str, restored: bool) -> None:  # case 33
    model, x = stack(2), tokens()
    reference = out(model, x)
    first = sagepatch.apply(model, variant=VARIANT, emulate=True)
    close = out(model, x)
    for block in model:
        WRAPPERS[wrapper](block)
    assert torch.equal(out(model, x), close)
    if restored:
        first.restore()
        assert torch.equal(out(model, x), reference)
    before = [layer.record.calls for layer in first.layers]
    second = sagepatch.apply(model, variant=VARIANT, emulate=True)
    assert torch.equal(out(model, x), close)
    assert [layer.record.calls for layer in second.layers] == [1, 1]
    assert [layer.record.calls for layer in first.layers] == before
    assert not second.replaced()
    second.restore()
    assert torch.equal(out(model, x), reference)


def test_second_patch_does_not_nest() -> None:  # case 33
    model, x = stack(2), tokens()
    reference, attributes = out(model, x), [set(vars(block)) for block in model]
    first = patch_all(model, VARIANT, finder=sdpa.find)
    second = patch_all(model, VARIANT, finder=sdpa.find)
    out(model, x)
    assert (first.calls(), second.calls()) == ([0, 0], [1, 1])
    assert first.replaced() == {"another patch"}
    first.restore()  # a stale undo leaves the newer patch alone
    out(model, x)
    assert second.calls() == [2, 2]
    second.restore()
    assert torch.equal(out(model, x), reference)
    assert [set(vars(block)) for block in model] == attributes


def test_forward_of_the_instances_own_stays_under_both() -> None:
    model, x = stack(1), tokens()
    block = model[0]

    def doubled(x: Tensor) -> Tensor:
        return 2 * Block.forward(block, x)

    block.forward = doubled
    reference = out(model, x)
    sagepatch.apply(model, variant=VARIANT, emulate=True)
    diffusers_hook(block)
    for _ in range(2):
        patch = sagepatch.apply(model, variant=VARIANT, emulate=True)
        torch.testing.assert_close(out(model, x), reference, rtol=0.05, atol=0.05)
        assert patch.layers[0].record.calls == 1
    patch.restore()
    assert torch.equal(out(model, x), reference)
    HookRegistry.check_if_exists_or_initialize(block).remove_hook("nothing")
    assert torch.equal(out(model, x), reference)


def test_hooks_taken_off_after_the_second_patch() -> None:
    model, x = stack(1), tokens()
    reference = out(model, x)
    sagepatch.apply(model, variant=VARIANT, emulate=True)
    accelerate_hook(model[0])
    patch = sagepatch.apply(model, variant=VARIANT, emulate=True)
    remove_hook_from_module(model[0])
    out(model, x)
    assert patch.layers[0].record.calls == 1
    patch.restore()
    assert torch.equal(out(model, x), reference)


@pytest.mark.parametrize("hook", ["diffusers' hook", "accelerate's hook"])
def test_copy_with_hooks_is_its_own(hook: str) -> None:
    import copy

    model, x = stack(1), tokens()
    reference = out(model, x)
    patch = sagepatch.apply(model, variant=VARIANT, emulate=True)
    twin: Any = copy.deepcopy(model)
    WRAPPERS[hook](twin[0])
    again = sagepatch.apply(twin, variant=VARIANT, emulate=True)
    out(twin, x)
    assert [again.layers[0].record.calls, patch.layers[0].record.calls] == [1, 0]
    again.restore()
    assert torch.equal(out(twin, x), reference)
