"""A patch of a diffusers model is undone to the bit, whatever happened to the model meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from models.diffusers_models import BUILDERS, forward, tiny_flux, tiny_sd3, tiny_unet
from models.patching import patch_all
from torch import nn

VARIANT = "emulated.sage2_8"


def processors(model: nn.Module) -> dict[str, Any]:
    return dict(model.attn_processors)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_undo_twice_is_harmless(family: str) -> None:  # case 33
    model, inputs = BUILDERS[family]()
    before, reference = processors(model), forward(model, inputs)
    patched = patch_all(model, VARIANT)
    patched.restore()
    patched.restore()
    assert processors(model) == before
    assert torch.equal(forward(model, inputs), reference)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_second_patch_does_not_nest(family: str) -> None:  # case 33
    model, inputs = BUILDERS[family]()
    before, reference = processors(model), forward(model, inputs)
    first = patch_all(model, VARIANT)
    second = patch_all(model, "emulated.sage1_b_f32")
    forward(model, inputs)
    assert set(first.calls()) == {0}
    assert set(second.calls()) == {1}
    first.restore()
    forward(model, inputs)
    assert set(second.calls()) == {2}  # a stale undo leaves the newer patch alone
    second.restore()
    assert processors(model) == before
    assert torch.equal(forward(model, inputs), reference)


def test_undo_after_an_error_in_the_middle_of_a_forward() -> None:  # case 33
    model, inputs = tiny_sd3()
    before, reference = processors(model), forward(model, inputs)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("test")

    hook = model.transformer_blocks[1].attn.to_q.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError), patch_all(model, VARIANT):
        forward(model, inputs)
    hook.remove()
    assert processors(model) == before
    assert torch.equal(forward(model, inputs), reference)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_hundred_rounds_leave_nothing_behind(family: str) -> None:  # case 33
    model, inputs = BUILDERS[family]()
    before, reference = processors(model), forward(model, inputs)
    patch_all(model, VARIANT).restore()  # classes are made once
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(100):
        patch_all(model, VARIANT).restore()
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert processors(model) == before
    assert torch.equal(forward(model, inputs), reference)


def test_one_processor_shared_by_all_layers() -> None:
    model, inputs = tiny_unet()
    shared = AttnProcessor2_0()
    model.set_attn_processor(shared)
    reference = forward(model, inputs)
    with patch_all(model, VARIANT) as patched:
        forward(model, inputs)
        assert patched.calls() == [1] * 20
        assert len({id(value) for value in processors(model).values()}) == 20
    assert all(value is shared for value in processors(model).values())
    assert torch.equal(forward(model, inputs), reference)


def test_torch_and_diffusers_stay_as_they_are() -> None:  # cases 32 and 34
    sdpa, call = F.scaled_dot_product_attention, FluxAttnProcessor.__call__
    attributes = dict(vars(FluxAttnProcessor))
    module = dict(vars(__import__("sys").modules[FluxAttnProcessor.__module__]))
    model, inputs = tiny_flux()
    other, _ = tiny_flux()
    reference = forward(other, inputs)
    with patch_all(model, VARIANT) as patched:
        forward(model, inputs)
        counts = patched.calls()
        assert torch.equal(forward(other, inputs), reference)
        third, _ = tiny_flux()
        assert torch.equal(forward(third, inputs), reference)
        assert patched.calls() == counts
        assert F.scaled_dot_product_attention is sdpa
        assert FluxAttnProcessor.__call__ is call
        assert dict(vars(FluxAttnProcessor)) == attributes
        assert dict(vars(__import__("sys").modules[FluxAttnProcessor.__module__])) == module


def test_other_models_run_inside_a_patched_forward() -> None:  # case 32
    model, inputs = tiny_sd3()
    inner, inner_inputs = tiny_unet()
    reference = forward(inner, inner_inputs)
    seen: list[bool] = []

    def hook(*_: object) -> None:
        seen.append(torch.equal(forward(inner, inner_inputs), reference))

    model.transformer_blocks[0].register_forward_hook(hook)
    with patch_all(model, VARIANT) as patched:
        forward(model, inputs)
    assert seen == [True]
    assert patched.calls() == [1] * 3


REPLACING = {
    "fuse_qkv_projections": ("FusedAttnProcessor2_0", lambda m: m.fuse_qkv_projections()),
    "set_attention_slice": ("SlicedAttnProcessor", lambda m: m.set_attention_slice("max")),
    "set_default_attn_processor": ("AttnProcessor", lambda m: m.set_default_attn_processor()),
    "set_attn_processor": ("AttnProcessor", lambda m: m.set_attn_processor(AttnProcessor())),
}


@pytest.mark.parametrize("call", REPLACING)
def test_library_call_that_replaces_processors(call: str) -> None:  # case 36
    name, replace = REPLACING[call]
    model, inputs = tiny_unet()
    reference = forward(model, inputs)
    patched = patch_all(model, VARIANT)
    replace(model)
    assert patched.replaced() == {name}
    torch.testing.assert_close(forward(model, inputs), reference, rtol=1e-4, atol=1e-4)
    assert set(patched.calls()) == {0}
    newer = processors(model)
    patched.restore()
    assert processors(model) == newer  # nothing stale over the newer ones
    again = patch_all(model, VARIANT)
    forward(model, inputs)
    served = call == "fuse_qkv_projections"
    assert len(again.layers) == (20 if served else 0)
    assert len(again.found.left) == (0 if served else 20)
    assert set(again.calls()) == ({1} if served else set())


@pytest.mark.parametrize("family", ["unet", "flux", "cogvideox"])
def test_fuse_and_unfuse(family: str) -> None:  # case 36
    model, inputs = BUILDERS[family]()
    reference = forward(model, inputs)
    patched = patch_all(model, VARIANT)
    close = forward(model, inputs)
    counts = patched.calls()
    model.fuse_qkv_projections()
    forward(model, inputs)
    model.unfuse_qkv_projections()
    # diffusers kept our stand-ins and put them back: they are in force again.
    assert not patched.replaced()
    torch.testing.assert_close(forward(model, inputs), close, rtol=1e-4, atol=1e-4)
    assert patched.calls()[0] > counts[0]
    model.fuse_qkv_projections()
    patched.restore()
    counts = patched.calls()
    model.unfuse_qkv_projections()
    # Those that come back now are retired: they do what the originals did.
    torch.testing.assert_close(forward(model, inputs), reference, rtol=1e-4, atol=1e-4)
    assert patched.calls() == counts
    with patch_all(model, VARIANT) as again:
        forward(model, inputs)
        assert set(again.calls()) == {1}
    originals = processors(model).values()
    assert all(type(value) is value.__class__ for value in originals)


def test_backend_chosen_after_the_patch_wins_and_survives_undo() -> None:  # case 36
    model, inputs = tiny_flux()
    reference = forward(model, inputs)
    patched = patch_all(model, VARIANT)
    attention = model.transformer_blocks[0].attn
    attention.set_attention_backend("_native_math")
    assert patched.replaced() == {"attention backend _native_math"}
    forward(model, inputs)
    assert patched.calls() == [0, 1, 1, 1]
    patched.restore()
    assert attention.processor._attention_backend == AttentionBackendName._NATIVE_MATH
    torch.testing.assert_close(forward(model, inputs), reference, rtol=1e-4, atol=1e-4)


def test_backend_chosen_before_the_patch_comes_back() -> None:
    model, inputs = tiny_flux()
    attention = model.transformer_blocks[0].attn
    attention.set_attention_backend("_native_math")
    chosen = attention.processor
    with patch_all(model, VARIANT) as patched:
        forward(model, inputs)
        assert patched.calls() == [1, 1, 1, 1]
    assert attention.processor is chosen
    assert vars(chosen) == {"_attention_backend": AttentionBackendName._NATIVE_MATH}


def test_what_was_set_on_a_processor_while_patched_stays_set() -> None:
    model, _ = tiny_flux()
    processor = model.transformer_blocks[0].attn.processor
    processor.mode = "before"
    patched = patch_all(model, VARIANT)
    model.transformer_blocks[0].attn.processor.mode = "while patched"
    model.transformer_blocks[0].attn.processor._parallel_config = "a plan"
    patched.restore()
    assert vars(processor) == {"mode": "while patched", "_parallel_config": "a plan"}


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_deep_copy_is_independent_and_unpatched(family: str) -> None:  # case 40
    model, inputs = BUILDERS[family]()
    reference = forward(model, inputs)
    with patch_all(model, VARIANT) as patched:
        twin = copy.deepcopy(model)
        assert torch.equal(forward(twin, inputs), reference)
        assert set(patched.calls()) == {0}
        with torch.no_grad():
            next(twin.transformer_blocks[0].attn.to_q.parameters()).add_(1.0)
        assert not torch.equal(forward(twin, inputs), reference)
    assert torch.equal(forward(model, inputs), reference)
    for value in processors(twin).values():
        assert type(value) is value.__class__
        assert not vars(value)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_pickle_is_the_unpatched_model(family: str) -> None:  # case 40
    model, inputs = BUILDERS[family]()
    plain, reference = pickle.dumps(model), forward(model, inputs)
    with patch_all(model, VARIANT):
        data = pickle.dumps(model)
    # No class or function of ours; the name of an attribute, None in a copy, may be there.
    assert b"sagepatch" not in data.replace(b"_sagepatch\x94", b"")
    assert len(data) - len(plain) < 100
    assert torch.equal(forward(pickle.loads(data), inputs), reference)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_saved_files_are_those_of_an_unpatched_save(family: str, tmp_path: Path) -> None:
    model, _ = BUILDERS[family]()
    model.save_pretrained(tmp_path / "plain")
    with patch_all(model, VARIANT):
        model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in names:  # case 40
        assert (tmp_path / "plain" / name).read_bytes() == (
            tmp_path / "patched" / name
        ).read_bytes()


def test_stand_in_is_its_original_to_diffusers() -> None:
    model, _ = tiny_flux()
    with patch_all(model, VARIANT):
        processor = model.transformer_blocks[0].attn.processor
        assert processor.__class__ is FluxAttnProcessor
        assert isinstance(processor, FluxAttnProcessor)
        assert type(processor).__name__ == "FluxAttnProcessor"
        assert repr(processor).startswith("<diffusers.models.transformers.transformer_flux.Flux")
        assert type(copy.copy(processor)) is FluxAttnProcessor
