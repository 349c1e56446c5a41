"""Models sharded by FSDP2 (`fully_shard`): patched before or after, given back, of one plan with
the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from models.diffusers_models import forward, tiny_pixart, tiny_sd3
from models.stacks import stack, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import sagepatch

FAST = "emulated.sage2_8"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _shard(model: nn.Module, blocks: nn.ModuleList | nn.Sequential, mesh: DeviceMesh) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("order", ["patch first", "shard first"])
def test_a_sharded_model_follows_the_plan_of_the_whole_one(mesh: DeviceMesh, order: str) -> None:
    model, x = stack(), tokens()
    with torch.no_grad():
        plain = model(x)
        with sagepatch.apply(model, variant=FAST) as patch:
            fast, plan = model(x), patch.plan()
        if order == "shard first":
            _shard(model, model, mesh)
        patch = sagepatch.apply(model, plan=plan, emulate=True)
        if order == "patch first":
            _shard(model, model, mesh)
        assert torch.equal(model(x), fast)
        assert all(layer.record.by_variant == {FAST: 1} for layer in patch.layers)
        assert not patch.replaced()
        patch.restore()
        assert torch.equal(model(x), plain)


# Dynamo guards more of a sharded module than of another, the defaults of a processor's call too.
@pytest.mark.parametrize("build", [tiny_sd3, tiny_pixart])
def test_a_sharded_model_compiles(mesh: DeviceMesh, build: Callable[..., Any]) -> None:
    model, inputs = build(2)
    torch._dynamo.reset()
    with torch.no_grad():
        plain = forward(model, inputs)
        with sagepatch.apply(model, variant=FAST):
            fast = forward(model, inputs)
        _shard(model, model.transformer_blocks, mesh)
        compiled = torch.compile(model, backend="eager")
        with sagepatch.apply(model, variant=FAST) as patch:
            assert torch.equal(forward(compiled, inputs), fast)
            assert all(layer.record.by_variant == {FAST: 1} for layer in patch.layers)
        assert torch.equal(forward(compiled, inputs), plain)
    torch._dynamo.reset()
