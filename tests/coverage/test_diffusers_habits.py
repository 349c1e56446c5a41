"""What users do to a model after it was patched, for every family: the result is that of an
unpatched model after the same, each layer is in force or reported as replaced, and patching again
repairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers_families import FAMILIES
from diffusers_family import Family, forward
from diffusers_rows import EXACT, find, row_of
from models.patching import Patched, patch_all
from torch import nn

# One family for each kind of processor and block; the others run with the slow tests.
QUICK = (
    "FLUX.1",
    "SD 3 / 3.5",
    "Qwen-Image 2.1",
    "CogVideoX 2B",
    "Wan 2.1, image to video",
    "Cosmos",
)
# What only UNets have.
QUICK_FOR_UNETS = ("slice attention", "default processors")


def fuse(model: Any) -> None:
    model.fuse_qkv_projections()


def fuse_and_unfuse(model: Any) -> None:
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()


def slice_attention(model: Any) -> None:
    model.set_attention_slice("max")


def default_processors(model: Any) -> None:
    model.set_default_attn_processor()


def own_processors_again(model: Any) -> None:
    """As pipelines do that borrow the layers for a while (PAG)."""
    model.set_attn_processor(dict(model.attn_processors))


def fresh_processors(model: Any) -> None:
    """As loaders of adapters do for the layers that they leave."""
    fresh = {name: value.__class__() for name, value in model.attn_processors.items()}
    model.set_attn_processor(fresh)


def native_backend(model: Any) -> None:
    model.set_attention_backend("native")


def reset_backend(model: Any) -> None:
    model.reset_attention_backend()


def low_rank_adapter(model: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(2)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))


def first_block_cache(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))


def broadcast(model: Any) -> None:
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        cross_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    )
    model.enable_cache(config)


# The call, and what a model must have for it.
HABITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "fuse": (fuse, "fuse_qkv_projections"),
    "fuse and unfuse": (fuse_and_unfuse, "unfuse_qkv_projections"),
    "slice attention": (slice_attention, "set_attention_slice"),
    "default processors": (default_processors, "set_default_attn_processor"),
    "own processors again": (own_processors_again, "set_attn_processor"),
    "fresh processors": (fresh_processors, "set_attn_processor"),
    "native backend": (native_backend, "set_attention_backend"),
    "reset backend": (reset_backend, "reset_attention_backend"),
    "low-rank adapter": (low_rank_adapter, "add_adapter"),
    "first-block cache": (first_block_cache, "enable_cache"),
    "broadcast": (broadcast, "enable_cache"),
}

# Some models announce a call and fail in it: too few blocks, other names, shapes of their own.
REFUSALS = (ValueError, IndexError, AttributeError, TypeError, RuntimeError)


@pytest.fixture(autouse=True)
def _same_backend_after() -> Iterator[None]:
    """`set_attention_backend` changes the default of the process."""
    before, _ = _AttentionBackendRegistry.get_active_backend()
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def idle_layers(patched: Patched, since: list[int]) -> set[str]:
    """Layers that no call has reached since these counts."""
    now = zip(patched.layers, patched.calls(), since, strict=True)
    return {name for name, calls, before in now if calls == before}


def replaced_layers(patched: Patched) -> dict[str, str]:
    """What took the place of the patch, by layer."""
    found = ((name, swap.replaced_by()) for name, swap in patched.swaps.items())
    return {name: by for name, by in found if by is not None}


def two_steps(family: Family, model: nn.Module) -> torch.Tensor:
    """Two forwards, so that what a cache keeps of the first has a say."""
    if getattr(model, "is_cache_enabled", False):
        model._reset_stateful_cache()
    context = getattr(model, "cache_context", contextlib.nullcontext)
    with context("conditioned"):
        steps = [forward(model, family.inputs(model.config, family.small)) for _ in range(2)]
    return torch.cat(steps)


def processors(model: nn.Module) -> dict[str, int]:
    """The processor of each module that has one, by identity."""
    held = ((name, getattr(module, "processor", None)) for name, module in model.named_modules())
    return {name: id(value) for name, value in held if value is not None}


def cases() -> Iterator[Any]:
    for family in FAMILIES:
        for habit, (_, needs) in HABITS.items():
            unet = family.name == "SDXL" and habit in QUICK_FOR_UNETS
            marks = () if unet or family.name in QUICK else pytest.mark.slow
            if hasattr(getattr(diffusers, family.model), needs):
                yield pytest.param(family, habit, id=f"{family}-{habit}", marks=marks)


@pytest.mark.parametrize(("family", "habit"), cases())
def test_right_result_honest_report_and_repair(family: Family, habit: str) -> None:  # case 36
    change, _ = HABITS[habit]
    model, twin = family.built(), family.built()
    try:
        change(twin)
        expected = two_steps(family, twin)
    except REFUSALS as refused:
        pytest.skip(f"unpatched, {family.model} refuses: {refused}")
    ran = row_of(family).runs[EXACT].patched
    idle = idle_layers(ran, [0] * len(ran.layers))
    patched = patch_all(model, EXACT, finder=find)
    change(model)
    before = patched.calls()
    torch.testing.assert_close(two_steps(family, model), expected, rtol=1e-4, atol=1e-5)
    replaced = replaced_layers(patched)
    assert idle_layers(patched, before) == idle | replaced.keys()
    newer = {name: held for name, held in processors(model).items() if name in replaced}
    again = patch_all(model, EXACT, finder=find)
    assert not again.replaced()
    torch.testing.assert_close(two_steps(family, model), expected, rtol=1e-4, atol=1e-5)
    assert idle_layers(again, [0] * len(again.layers)) <= idle
    again.restore()
    patched.restore()
    torch.testing.assert_close(two_steps(family, model), expected, rtol=1e-4, atol=1e-5)
    after = processors(model)
    for name, by in replaced.items():
        # Nothing stale over what took our place.
        assert by.startswith("attention backend") or after[name] == newer[name]
