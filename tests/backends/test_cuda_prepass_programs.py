"""The programs of the CUDA pre-pass and what surrounds them: parameters, registers, parts of a sum,
division, refusals. Compiles; runs nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_prepass_support import DEVICE, make

from sagepatch.backends.cuda import build
from sagepatch.backends.cuda.launch import Layout
from sagepatch.backends.cuda.prepass import (
    KEYS_AND_VALUES,
    MOST_CHUNKS,
    QUERIES,
    _chunks,
    divisor,
    instances,
    plan_of,
    prepare,
)
from sagepatch.backends.cuda.prepass_form import form_of
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import RECIPES


def test_signatures_are_those_of_the_machine_code():
    made = build.compile_program(instances("sm_90a")[0])
    sizes = {r.kernel: tuple(size for _, size in r.params) for r in made.resources}
    assert sizes == {
        "queries": Layout.of(QUERIES).sizes,
        "keys_and_values": Layout.of(KEYS_AND_VALUES).sizes,
    }


def _forms(dims, dtypes, options):
    for dim, dtype, option in itertools.product(dims, dtypes, options):
        yield make((1, 2, 1, 8, 8, dim, dim), dtype, **option)


@pytest.mark.parametrize("name", ["sage2_8", "sage1_b", "sage1_t", "sage2_8b_k128"])
def test_common_instances_spill_nothing(name):
    for call in _forms((128,), (torch.bfloat16,), ({}, {"return_lse": True})):
        made = build.compile_program(plan_of(form_of(call, RECIPES[name])).program)
        assert [r.stack_bytes for r in made.resources] == [0, 0], name
        assert not made.log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage2_8", "sage1_b"])
@pytest.mark.parametrize("dim", [8, 64, 80, 100, 160, 256])
def test_every_head_size_compiles_without_spills(name, dim):
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    options = (
        {"return_lse": True},
        {"attn_mask": torch.ones(1, 1, 1, 8, dtype=torch.bool)},
        {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
    )
    for call in _forms((dim,), (torch.bfloat16, torch.float32), options):
        made = build.compile_program(plan_of(form_of(call, RECIPES[name])).program)
        assert [r.stack_bytes for r in made.resources] == [0, 0], (call.q.dtype, dim)


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 36, 139, 1563, 7813])
@pytest.mark.parametrize("row_bytes", [16, 128, 256, 1024])
def test_every_chunk_has_a_block(blocks, row_bytes):
    chunks = _chunks(blocks, row_bytes)
    assert 1 <= chunks <= min(MOST_CHUNKS, blocks)


@pytest.mark.parametrize("by", [1, 2, 3, 7, 24, 128, 641, 65535, 65536, 2**30 + 1, 2**31 - 1])
def test_division_by_multiplication_is_exact(by):
    _, multiplier, shift = divisor(by)
    assert -(2**31) <= multiplier < 2**31
    numbers = {0, 1, by - 1, by, by + 1, 2**31 - 1, (2**31 - 1) // by * by, 123456789}
    for n in numbers | {max(0, (2**31 - 1) // by * by - 1)}:
        if n < 2**31:
            found = n * (multiplier % 2**32) >> (32 + shift) if multiplier else n
            assert found == n // by, n


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"rotate": True}, "rotation"),
        ({"smooth_v": True}, "smoothed V"),
        ({"k_granularity": "tensor"}, "a scale per tensor of K"),
        ({"smooth_q": True, "q_block": 64}, "smoothed blocks of 64 queries"),
    ],
    ids=str,
)
def test_other_recipes_are_refused(other, said):
    with pytest.raises(InvalidArgument, match=said):
        prepare(make((1, 1, 1, 8, 8, 64, 64)), replace(RECIPES["sage2_8"], **other))


def test_other_calls_are_refused():
    recipe = RECIPES["sage2_8"]
    call = make((1, 1, 1, 8, 8, 64, 64))
    full = torch.ones(8, 8, dtype=torch.bool, device=DEVICE)
    with pytest.raises(InvalidArgument, match="masks of keys only"):
        prepare(replace(call, attn_mask=full), recipe)
    with pytest.raises(InvalidArgument, match="at most 256"):
        prepare(make((1, 1, 1, 8, 8, 264, 64)), recipe)
    with pytest.raises(InvalidArgument, match="float64"):
        prepare(replace(call, q=call.q.double()), recipe)
