"""Low-rank adapters on patched diffusers models: loaded before or after, swapped in place, fused,
scaled, off and gone, the result is always that of the unpatched model and the patch stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers_families import FAMILIES
from diffusers_family import Family, forward
from diffusers_rows import EXACT, FAST, find
from models.patching import patch_all
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor, nn

import sagepatch

BY_NAME = {family.name: family for family in FAMILIES}
# One family for each way in, and one whose text side has projections of its own.
LORA = [BY_NAME[name] for name in ("FLUX.1", "SDXL", "SD 3 / 3.5", "Wan 2.1, image to video")]
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def config(rank: int = 2) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False)


def weights(family: Family, seed: int) -> dict[str, Tensor]:
    """The state dict of an adapter, as a file would hold it."""
    model = family.built()
    torch.manual_seed(seed)
    model.add_adapter(config())
    return get_peft_model_state_dict(model)


def load(model: Any, family: Family, seed: int, *, hotswap: bool = False) -> None:
    model.load_lora_adapter(
        weights(family, seed), adapter_name="style", prefix=None, hotswap=hotswap
    )


Step = Callable[[Any, Family], object]
# A life with adapters, one step after the other.
STEPS: dict[str, Step] = {
    "loaded": lambda model, family: load(model, family, 1),
    "swapped in place": lambda model, family: load(model, family, 2, hotswap=True),
    "half as strong": lambda model, _: model.set_adapters(["style"], [0.5]),
    "off": lambda model, _: model.disable_lora(),
    "on": lambda model, _: model.enable_lora(),
    "fused": lambda model, _: model.fuse_lora(adapter_names=["style"]),
    "unfused": lambda model, _: model.unfuse_lora(),
    "gone": lambda model, _: model.delete_adapters(["style"]),
}


def run(model: nn.Module, family: Family) -> Tensor:
    return forward(model, family.inputs(model.config, family.small))


@pytest.mark.parametrize("family", LORA, ids=str)
def test_a_life_with_adapters(family: Family) -> None:  # case 39
    model, twin = family.built(), family.built()
    first = run(model, family)
    last = first
    with patch_all(model, EXACT, finder=find) as patched:
        for name, step in STEPS.items():
            step(model, family)
            step(twin, family)
            before = patched.calls()
            out, expected = run(model, family), run(twin, family)
            assert torch.equal(out, expected), name
            assert not patched.replaced(), name
            assert all(now > was for now, was in zip(patched.calls(), before, strict=True)), name
            assert name == "on" or not torch.equal(out, last), name
            last = out
        torch.testing.assert_close(last, first, rtol=1e-3, atol=1e-4)
    assert torch.equal(run(model, family), run(twin, family))


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(BY_NAME[name], id=name) for name in ("FLUX.1", "SD 3 / 3.5")),
        *(
            pytest.param(BY_NAME[name], id=name, marks=pytest.mark.slow)
            for name in ("SDXL", "Wan 2.1, image to video")
        ),
    ],
)
def test_quantised_layers_see_the_adapter(family: Family, order: str) -> None:
    model = family.built()
    plain = run(model, family)
    if order == "before the patch":
        load(model, family, 1)
    patch = sagepatch.apply(model, variant=FAST, emulate=True)
    if order == "after the patch":
        load(model, family, 1)
    out = run(model, family)
    assert not patch.replaced()
    assert {variant for layer in patch.layers for variant in layer.record.by_variant} == {FAST}
    patch.restore()
    expected = run(model, family)
    moved = (expected - plain).norm()
    # What the adapter does is far more than what the kernels cost.
    assert 0 < (out - expected).norm() < 0.2 * moved


@pytest.mark.parametrize("family", LORA[:1], ids=str)
def test_compiled_blocks_follow_the_adapter(family: Family) -> None:  # case 39
    model, twin = family.built(), family.built()
    patch = sagepatch.apply(model, variant=FAST, emulate=True)
    eager = run(model, family)
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    first = run(model, family)
    torch.testing.assert_close(first, eager, rtol=1e-5, atol=1e-5)
    load(model, family, 1)
    second = run(model, family)
    load(twin, family, 1)
    expected = run(twin, family)
    assert (second - expected).norm() < 0.2 * (expected - first).norm()
    model.delete_adapters(["style"])
    torch.testing.assert_close(run(model, family), first, rtol=1e-5, atol=1e-5)
    assert not patch.replaced()
    torch._dynamo.reset()


def test_adapter_trained_elsewhere_is_kept_by_restore() -> None:
    family = LORA[0]
    model = family.built()
    patch = sagepatch.apply(model, variant=FAST, emulate=True)
    load(model, family, 1)
    keys = set(model.state_dict())
    patch.restore()
    assert set(model.state_dict()) == keys
    assert any("lora" in key for key in keys)
