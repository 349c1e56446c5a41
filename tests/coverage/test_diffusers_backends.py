"""Processors that do not pass their own backend on: the op is reached all the same, and a report
tells when one of diffusers' backends took its place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers_families import FAMILIES
from diffusers_family import Family, forward
from diffusers_rows import EXACT, FAST, find
from models.patching import patch_all
from torch._dynamo.testing import CompileCounter

BY_NAME = {family.name: family for family in FAMILIES}
COSMOS, QWEN21, FLUX = BY_NAME["Cosmos"], BY_NAME["Qwen-Image 2.1"], BY_NAME["FLUX.1"]


@pytest.mark.parametrize("family", [COSMOS, QWEN21], ids=str)
def test_default_backend_that_calls_no_sdpa_is_reported(family: Family) -> None:  # case 36
    model = family.built()
    patched = patch_all(model, FAST, finder=find)
    assert not patched.replaced()
    with attention_backend("flex"):
        assert patched.replaced() == {"attention backend flex"}
    with attention_backend("_native_math"):
        assert not patched.replaced()
        forward(model, family.inputs(model.config, family.small))
    assert 0 not in patched.calls()


def test_default_backend_is_nothing_to_a_layer_with_a_handle() -> None:
    model = FLUX.built()
    patched = patch_all(model, FAST, finder=find)
    with attention_backend("flex"):
        assert not patched.replaced()
        forward(model, FLUX.inputs(model.config, FLUX.small))
    assert patched.calls() == [1, 1, 1, 1]


def test_backend_of_a_layer_that_asks_for_the_default_elsewhere() -> None:
    model = QWEN21.built()
    patched = patch_all(model, FAST, finder=find)
    model.transformer_blocks[0].attn.processor._attention_backend = "flash"
    assert patched.replaced() == {"attention backend flash"}
    patched.restore()
    assert model.transformer_blocks[0].attn.processor._attention_backend == "flash"


@pytest.mark.parametrize("variant", [EXACT, FAST])
def test_cached_prefix_of_qwen_image_21(variant: str) -> None:
    """First step: every segment and the picture; later steps: the picture over the kept prefix."""
    model = QWEN21.built()

    def two_steps() -> torch.Tensor:
        given = QWEN21.inputs(model.config, QWEN21.small)
        cache = QwenImage21KVCache(len(model.transformer_blocks))
        first = forward(model, {**given, "kv_cache": cache, "kv_cache_mode": "extract"})
        given["timestep"] = given["timestep"] * 0.5
        later = forward(model, {**given, "kv_cache": cache, "kv_cache_mode": "cached"})
        return torch.cat([first, later])

    reference = two_steps()
    with patch_all(model, variant, finder=find) as patched:
        out = two_steps()
        assert patched.ran() == {variant: 6}
    assert torch.equal(out, reference) == (variant == EXACT)
    torch.testing.assert_close(out, reference, rtol=0.05, atol=0.05)
    assert torch.equal(two_steps(), reference)


@pytest.mark.slow
@pytest.mark.parametrize("family", [COSMOS, QWEN21], ids=str)
def test_compiled_blocks_are_as_many_graphs_as_unpatched(family: Family) -> None:
    layers = replace(family, tiny=family.tiny | {"num_layers": 12})
    model = layers.built()
    given = layers.inputs(model.config, layers.small)

    def graphs() -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        for block in model.transformer_blocks:
            block.compile(backend=counter, fullgraph=True)
        forward(model, given)
        for block in model.transformer_blocks:
            block._compiled_call_impl = None
        return counter.frame_count

    unpatched = graphs()
    with patch_all(model, FAST, finder=find) as patched:
        eager = forward(model, given)
        once = patched.calls()
        assert graphs() == unpatched
        assert patched.calls() == [2 * calls for calls in once]
        assert eager.isfinite().all()
