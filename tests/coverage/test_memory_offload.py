"""Offloading, casting and placing of patched models, before the patch and after it. The CPU stands
in for the accelerator: hooks, copies and meta tensors are the real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.diffusers_models import tiny_flux, tiny_sd3, tiny_unet
from models.transformers_models import first_output, tiny_bert, tiny_falcon, tiny_llama, tiny_t5
from torch import Tensor, nn

import sagepatch
from sagepatch.calibration.capture import SAMPLED_CALLS

RECIPE = "sage1_b_f32"
# What INT8 scores may cost a whole model.
NEAR = 0.05
BUILDS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": tiny_llama,
    "t5": tiny_t5,
    "falcon": tiny_falcon,
    "flux": tiny_flux,
    "sd3": tiny_sd3,
    "unet": tiny_unet,
}
CPU = torch.device("cpu")


def slow(family: Any) -> Any:
    """The same for a further family, in the long matrix."""
    return pytest.param(family, marks=pytest.mark.slow)


def _out(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return first_output(model, inputs)


# Each switches one manner on, given a folder to write to, and returns what switches it off, if
# anything does.
Off = Callable[[], None] | None


def _sequential(model: nn.Module, folder: Path) -> Off:
    """Every weight waits as a meta tensor and comes for its module's call alone."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    cpu_offload(model, CPU)
    return lambda: remove_hook_from_submodules(model)


def _whole(model: nn.Module, folder: Path) -> Off:
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    cpu_offload_with_hook(model, CPU)
    return lambda: remove_hook_from_module(model)


def _disk(model: nn.Module, folder: Path) -> Off:
    from accelerate import disk_offload
    from accelerate.hooks import remove_hook_from_submodules

    disk_offload(model, str(folder), CPU)
    return lambda: remove_hook_from_submodules(model)


def _dispatched(model: nn.Module, folder: Path) -> Off:
    """A device map over two places: half of the blocks on disk."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    parts = [name for name, part in model.named_children() if any(True for _ in part.parameters())]
    places = {name: "cpu" if i % 2 == 0 else "disk" for i, name in enumerate(parts)}
    places |= {name: "cpu" for name, _ in model.named_parameters(recurse=False)}
    dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    return lambda: remove_hook_from_submodules(model)


def _group(kind: str) -> Callable[[nn.Module, Path], Off]:
    def switch_on(model: nn.Module, folder: Path) -> Off:
        from diffusers.hooks import apply_group_offloading

        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(model, CPU, CPU, kind, **blocks)
        return None

    return switch_on


def _layerwise(dtype: torch.dtype) -> Callable[[nn.Module, Path], Off]:
    def switch_on(model: nn.Module, folder: Path) -> Off:
        from diffusers.hooks import apply_layerwise_casting

        apply_layerwise_casting(model, dtype, torch.float32)
        return None

    return switch_on


MANNERS: dict[str, Callable[[nn.Module, Path], Off]] = {
    "sequential": _sequential,
    "whole model": _whole,
    "disk": _disk,
    "device map": _dispatched,
    "groups of blocks": _group("block_level"),
    "groups of leaves": _group("leaf_level"),
    "stored in fp8": _layerwise(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("family", [slow("llama"), "falcon", "flux", slow("sd3")])
def test_right_in_either_order(family: str, manner: str, order: str, tmp_path: Path) -> None:
    # cases 36, 48
    model, inputs = BUILDS[family]()
    reference, _ = BUILDS[family]()
    MANNERS[manner](reference, tmp_path / "reference")
    plain = _out(reference, inputs)
    if order == "before the patch":
        MANNERS[manner](model, tmp_path / "model")
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    if order == "after the patch":
        MANNERS[manner](model, tmp_path / "model")
    out = _out(model, inputs)
    assert 0 < (out - plain).norm() < NEAR * plain.norm()
    assert all(set(layer.record.by_variant) == {f"emulated.{RECIPE}"} for layer in patch.layers)
    assert not patch.replaced()
    patch.restore()
    assert torch.equal(_out(model, inputs), plain)
    assert all(layer.record.calls == 1 for layer in patch.layers)


def _attributes(model: nn.Module) -> list[set[str]]:
    """What every module carries; accelerate may leave a class's own forward on an instance."""
    return [set(vars(module)) - {"forward"} for module in model.modules()]


@pytest.mark.parametrize("gone_first", ["patch", "offload"])
@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize("manner", ["sequential", "whole model", "device map"])
@pytest.mark.parametrize("family", [slow("t5"), "falcon", slow("unet")])
def test_both_leave_in_any_order(
    family: str, manner: str, order: str, gone_first: str, tmp_path: Path
) -> None:
    # case 33
    switch_on = MANNERS[manner]
    twin, inputs = BUILDS[family]()
    plain = _out(twin, inputs)
    alone = switch_on(twin, tmp_path / "twin")
    assert alone is not None
    alone()
    model, _ = BUILDS[family]()
    if order == "before the patch":
        off = switch_on(model, tmp_path / "model")
        patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    else:
        patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
        off = switch_on(model, tmp_path / "model")
    assert off is not None
    assert not torch.equal(_out(model, inputs), plain)
    for leave in (patch.restore, off) if gone_first == "patch" else (off, patch.restore):
        leave()
    assert _attributes(model) == _attributes(twin)
    if not any(p.is_meta for p in twin.parameters()):
        assert torch.equal(_out(model, inputs), plain)


def test_loaded_with_a_device_map(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, inputs = tiny_llama()
    plain = _out(model, inputs)
    model.save_pretrained(tmp_path / "saved")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    placed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map=places | {"model.layers.2": "disk"},
        offload_folder=str(tmp_path / "weights"),
    ).eval()
    assert torch.allclose(_out(placed, inputs), plain, atol=1e-5)
    patch = sagepatch.apply(placed, variant=RECIPE, emulate=True)
    out = _out(placed, inputs)
    assert 0 < (out - plain).norm() < NEAR * plain.norm()
    assert len(patch.layers) == 3
    patch.restore()
    assert torch.allclose(_out(placed, inputs), plain, atol=1e-5)


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_falcon])
def test_prepared_for_mixed_precision(build: Any, order: str) -> None:
    # case 23: accelerate wraps the model's forward in autocast
    from accelerate import Accelerator

    model, inputs = build()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if order == "before the patch":
        model = accelerator.prepare(model)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    if order == "after the patch":
        model = accelerator.prepare(model)
    _out(model, inputs)
    for layer in patch.layers:
        assert layer.record.by_variant == {f"emulated.{RECIPE}": 1}
        assert {spec.dtype for spec in layer.record.specs} == {"bf16"}
    patch.restore()
    _out(model, inputs)
    assert all(layer.record.calls == 1 for layer in patch.layers)


def _live() -> int:
    """Tensors alive in the process."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("build", [tiny_falcon, tiny_flux, slow(tiny_bert), slow(tiny_unet)])
def test_nothing_is_kept_between_calls(build: Any) -> None:
    # cases 39, 58, 68: neither by kernels nor by measuring
    model, inputs = build()
    with torch.no_grad():
        model(**inputs)
    patch = sagepatch.apply(model, emulate=True)
    with torch.no_grad():
        model(**inputs)
        before = _live()
        for _ in range(SAMPLED_CALLS[-1]):
            model(**inputs)
    assert patch.locked
    assert _live() <= before
    patch.restore()
    assert _live() <= before
