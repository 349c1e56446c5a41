"""Quantised weights under quantised attention: torchao, quanto, bitsandbytes and GGUF, as far as
they are installed and run on the CPU. Copies, pickles and saved files of patched models.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.diffusers_models import tiny_flux, tiny_sd3
from models.transformers_models import first_output, tiny_falcon, tiny_llama
from torch import Tensor, nn

import sagepatch

RECIPE = "sage1_b_f32"
# What INT8 scores may cost a whole model.
NEAR = 0.05
BUILDS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": tiny_llama,
    "falcon": tiny_falcon,
    "flux": tiny_flux,
    "sd3": tiny_sd3,
}


def _torchao(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


def _quanto(model: nn.Module) -> nn.Module:
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)
    return model


def _replace_linear(model: nn.Module, made: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            # GGUF packs 32 values a block.
            if type(child) is nn.Linear and child.in_features % 32 == 0:
                setattr(part, name, made(child))
    return model


def _bitsandbytes_8(model: nn.Module) -> nn.Module:
    import bitsandbytes as bnb

    def made(linear: nn.Linear) -> nn.Module:
        ours = bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, linear.bias is not None, False
        )
        ours.load_state_dict(linear.state_dict(), strict=False)
        return ours

    return _replace_linear(model, made).to("cpu")


def _bitsandbytes_4(model: nn.Module) -> nn.Module:
    import bitsandbytes as bnb

    def made(linear: nn.Linear) -> nn.Module:
        ours = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, quant_type="nf4"
        )
        ours.load_state_dict(linear.state_dict(), strict=False)
        return ours

    return _replace_linear(model, made).to("cpu")


def _gguf(model: nn.Module) -> nn.Module:
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    def made(linear: nn.Linear) -> nn.Module:
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
        ours = GGUFLinear(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32
        )
        ours.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
        if linear.bias is not None:
            ours.bias = linear.bias
        return ours

    return _replace_linear(model, made)


KINDS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "torchao int8": ("torchao", _torchao),
    "quanto int8": ("optimum.quanto", _quanto),
    "bitsandbytes int8": ("bitsandbytes", _bitsandbytes_8),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes_4),
    "gguf q8_0": ("gguf", _gguf),
}


# Falcon transposes its weights, which torchao's tensors cannot be, patched or not.
WEIGHTS = [(f, k) for k in KINDS for f in BUILDS if (f, k) != ("falcon", "torchao int8")]


@pytest.mark.parametrize("order", ["before the patch", "after the patch"])
@pytest.mark.parametrize(("family", "kind"), WEIGHTS)
def test_quantised_weights(family: str, kind: str, order: str) -> None:
    # case 23: weights that are no floating-point tensors decide nothing
    package, quantise = KINDS[kind]
    pytest.importorskip(package)
    twin, inputs = BUILDS[family]()
    plain = first_output(quantise(twin), inputs)
    model, _ = BUILDS[family]()
    if order == "before the patch":
        model = quantise(model)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    if order == "after the patch":
        quantise(model)
    out = first_output(model, inputs)
    assert 0 < (out - plain).norm() < NEAR * plain.norm()
    assert all(set(layer.record.by_variant) == {f"emulated.{RECIPE}"} for layer in patch.layers)
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)


def _same_after(model: nn.Module, inputs: dict[str, Any], plain: Tensor) -> None:
    """A copy is unpatched, on its own, and can be patched."""
    assert torch.equal(first_output(model, inputs), plain)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    assert 0 < (first_output(model, inputs) - plain).norm() < NEAR * plain.norm()
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("family", BUILDS)
def test_copies(family: str, way: str, tmp_path: Path) -> None:
    # case 40
    model, inputs = BUILDS[family]()
    plain = first_output(model, inputs)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    _same_after(twin, inputs, plain)
    assert all(layer.record.calls == 0 for layer in patch.layers)
    first_output(model, inputs)
    assert all(layer.record.calls == 1 for layer in patch.layers)


@pytest.mark.parametrize("family", BUILDS)
def test_saved_and_loaded(family: str, tmp_path: Path) -> None:
    # case 40: the same files, byte by byte, and a model that loads them
    model, inputs = BUILDS[family]()
    plain, state = first_output(model, inputs), model.state_dict()
    model.save_pretrained(tmp_path / "plain")
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    first_output(model, inputs)
    model.save_pretrained(tmp_path / "patched")
    assert list(model.state_dict()) == list(state)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in names:
        both = [(tmp_path / folder / name).read_bytes() for folder in ("plain", "patched")]
        assert both[0] == both[1], name
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    _same_after(loaded, inputs, plain)
    # Weights that are loaded into a patched model are the ones that it runs.
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.5)
    model.load_state_dict(state | dict(loaded.state_dict()))
    patch.restore()
    assert torch.equal(first_output(model, inputs), plain)


def test_a_copy_under_offloading_hooks() -> None:
    # case 40
    from accelerate import cpu_offload

    model, inputs = tiny_llama()
    plain = first_output(model, inputs)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    cpu_offload(model, torch.device("cpu"))
    first_output(model, inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(first_output(twin, inputs), plain)
    assert all(layer.record.calls == 1 for layer in patch.layers)


def test_a_cache_of_quantised_keys_and_values() -> None:
    pytest.importorskip("optimum.quanto")
    model, inputs = tiny_llama()
    config = {"backend": "quanto", "nbits": 4, "residual_length": 8, "q_group_size": 16}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "quantized", "cache_config": config}
    plain = model.generate(**inputs, **options)
    sagepatch.apply(model, variant="exact")
    assert torch.equal(model.generate(**inputs, **options), plain)
    patch = sagepatch.apply(model, variant=RECIPE, emulate=True)
    model.generate(**inputs, **options)
    for layer in patch.layers:
        assert layer.record.by_variant == {f"emulated.{RECIPE}": 1, "sdpa.exact": 5}
