"""Every family of diffusers, tiny: each SDPA call of it goes through a patched layer, exact kernels
change no bit, quantised ones little, and restore brings back every bit.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from diffusers_families import FAMILIES
from diffusers_family import Family
from diffusers_others import OTHERS
from diffusers_rows import EXACT, FAST, SAFE, find, row_of
from torch import Tensor

from sagepatch.patchers.sdpa_redirect import RANK

# The relative error that goes with the cosine of these recipes on random data: 0.9999 for integer
# Q and K with half-precision P and V, 0.9993 with all of them in 8 bits. Errors of different calls
# have nothing to do with each other, so their squares add up.
CLOSE = {SAFE: math.sqrt(2 * (1 - 0.9999)), FAST: math.sqrt(2 * (1 - 0.9993))}


def relative(out: Tensor, reference: Tensor) -> float:
    return ((out - reference).norm() / reference.norm()).item()


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    made: Family = request.param
    return made


def test_every_call_goes_through_a_patched_layer_and_no_bit_changes(family: Family) -> None:
    row = row_of(family)
    ran = row.runs[EXACT]
    assert row.reference.isfinite().all()
    assert ran.patched.layers
    calls = ran.patched.calls()
    assert sum(calls) == row.sdpa_calls  # case 37
    assert torch.equal(ran.out, row.reference)
    idle = [name for name, layer in ran.patched.layers.items() if not layer.record.calls]
    assert all(family.idle and re.match(family.idle, name) for name in idle), idle


@pytest.mark.parametrize("variant", [FAST, pytest.param(SAFE, marks=pytest.mark.slow)])
def test_quantised_is_close_and_restore_brings_back_every_bit(family: Family, variant: str) -> None:
    row = row_of(family) if variant == FAST else row_of(family, (SAFE,))
    ran = row.runs[variant]
    assert ran.patched.ran() == {variant: row.sdpa_calls}
    assert not ran.patched.fallbacks()
    assert 0 < relative(ran.out, row.reference) < CLOSE[variant] * math.sqrt(row.sdpa_calls)
    assert torch.equal(row.after, row.reference)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_models_run_the_kernel_at_every_call_and_come_back(other: Family) -> None:
    row = row_of(other)
    exact, fast = row.runs[EXACT], row.runs[FAST]
    assert sum(exact.patched.calls()) == row.sdpa_calls > 0  # case 37
    assert torch.equal(exact.out, row.reference)
    fallbacks = fast.patched.fallbacks()
    assert fast.patched.ran()[FAST] + sum(fallbacks.values()) == row.sdpa_calls
    # One autoencoder calls SDPA over [batch, tokens, channels].
    assert set(fallbacks) <= {RANK}
    assert torch.equal(fast.out, row.reference) == bool(fallbacks)
    assert torch.equal(row.after, row.reference)


KINDS = {
    # Their self-attention is given a width for the keys, which diffusers calls cross-attention.
    ("Kandinsky 3", "up_blocks.0.attentions.0.attention"): "self",
    ("Kandinsky 3", "up_blocks.0.attentions.1.attention"): "cross",
    ("OmniGenTransformer2DModel", "layers.0.self_attn"): "joint",
    ("aMUSEd", "transformer_layers.0.attn1"): "self",
    ("aMUSEd", "transformer_layers.0.attn2"): "cross",
    ("Wan Animate", "face_adapter.0"): "cross",
    ("LTX-2", "transformer_blocks.0.audio_to_video_attn"): "cross",
}


@pytest.mark.parametrize(("name", "site"), KINDS)
def test_kind_of_layers_whose_flag_misleads(name: str, site: str) -> None:
    (model,) = (each for each in (*FAMILIES, *OTHERS) if each.name == name)
    kinds = {layer.name: layer.kind for layer in find(model.built(), "").sites}
    assert kinds[site] == KINDS[name, site]
