"""Copies of modules whose forward is ours on the instance: shallow, deep and pickled ones are the
class's own again, replicas of `nn.DataParallel` stay patched over their own weights. Case 40.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models.stacks import Block, stack, tokens
from torch import Tensor, nn

import sagepatch

VARIANT = "sage1_b_f32"


@torch.no_grad()
def out(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def patched() -> tuple[nn.Sequential, Tensor, Tensor, sagepatch.Patch]:
    model, x = stack(1), tokens()
    plain = out(model, x)
    return model, x, plain, sagepatch.apply(model, variant=VARIANT, emulate=True)


def with_other_weights(twin: Any) -> nn.Module:
    """A shallow copy shares its parts with the original: give it parts of its own."""
    torch.manual_seed(7)
    twin._modules = dict(Block()._modules)
    return twin


def expected() -> nn.Module:
    torch.manual_seed(7)
    return Block()


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))]
)
def test_a_copy_is_the_class_s_own(make: Any) -> None:
    model, x, plain, patch = patched()
    twin = make(model[0])
    assert torch.equal(out(twin, x), plain)
    assert torch.equal(out(with_other_weights(twin), x), out(expected(), x))
    assert patch.layers[0].record.calls == 0
    assert vars(twin).keys() == vars(Block()).keys()
    # And the original is patched as before.
    assert not torch.equal(out(model, x), plain)
    assert patch.layers[0].record.calls == 1
    sagepatch.restore(twin)
    assert not patch.restored


def test_a_forward_of_the_instance_s_own_goes_along() -> None:
    model, x = stack(1), tokens()
    inner = model[0].forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * inner(x)

    model[0].forward = doubled
    plain = out(model, x)
    sagepatch.apply(model, variant=VARIANT, emulate=True)
    twin = copy.copy(model[0])
    assert twin.forward is doubled
    assert not torch.equal(out(model, x), plain)


class Counting(Block):
    """A class with a state of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "was_copied": True}


def test_a_class_s_own_state_is_kept() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Counting()).eval(), tokens()
    plain = out(model, x)
    sagepatch.apply(model, variant=VARIANT, emulate=True)
    twin = copy.copy(model[0])
    assert twin.was_copied
    assert torch.equal(out(twin, x), plain)


def test_a_restore_takes_the_methods_back() -> None:
    model, x, plain, patch = patched()
    before = vars(Block()).keys()
    patch.restore()
    assert vars(model[0]).keys() == before
    assert torch.equal(out(copy.copy(model)[0], x), plain)


def test_a_replica_is_patched_over_its_own_weights() -> None:
    # What nn.parallel.replicate does on several GPUs, without the GPUs.
    model, x, plain, patch = patched()
    whole = model._replicate_for_data_parallel()
    replica = with_other_weights(model[0]._replicate_for_data_parallel())
    whole._modules = {"0": replica}
    exact = out(expected(), x)
    error = (out(whole, x) - exact).norm() / exact.norm()
    assert 0 < error < 0.05
    assert patch.layers[0].record.by_variant == {f"emulated.{VARIANT}": 1}
    assert not torch.equal(out(model, x), plain)
    patch.restore()
    assert torch.equal(out(model, x), plain)
