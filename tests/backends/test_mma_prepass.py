"""What the pre-pass does for mma.sync alone: INT4 codes of Q and K, smoothed Q and its scores, INT8
values; bit for bit given the means. On a GPU, or else its source on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc")

from mma_support import (
    CPU_TARGET,
    DEVICE,
    ON_GPU,
    RUNS,
    WHY_NOT,
    kernels_here,  # noqa: F401
    make,
)

from sagepatch.backends.cuda import prepass as cuda_prepass
from sagepatch.backends.cuda.prepass_form import form_of
from sagepatch.backends.cuda_mma import prepass
from sagepatch.backends.cuda_mma.machine import target_of
from sagepatch.numerics import quantize
from sagepatch.numerics.exact import members
from sagepatch.numerics.masks import seen_keys
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.numerics.smooth import block_mean
from sagepatch.spec import Call

pytestmark = [
    pytest.mark.skipif(not RUNS, reason=WHY_NOT),
    pytest.mark.usefixtures("kernels_here"),
]

NAMES = ["sage2pp_4", "sage2_4_f16", "sage1_vt", "sage1_vb"]
SMOOTHED = ["sage2pp_4"] if not ON_GPU else ["sage2pp_4", "sage2_4", "sage2_4_f16"]
TARGET = target_of(DEVICE) if ON_GPU else CPU_TARGET
CPU = torch.device("cpu")


def unpacked(codes: Tensor, recipe: Recipe) -> Tensor:
    """Codes [..., bytes] as fp32 [..., columns]: two a byte in INT4, the first in its low half."""
    if recipe.qk_bits == 8:
        return codes.float()
    low, high = codes << 4 >> 4, codes >> 4
    return torch.stack([low, high], -1).flatten(-2).float()


def in_order(values: Tensor) -> Tensor:
    """INT8 values [B, Hkv, D8, Nkp] as [B, Hkv, Nkp, D8] fp32, the order of keys undone."""
    where = torch.tensor([2 * t + (j & 1) + 8 * (j >> 1) for t in range(4) for j in range(4)])
    blocks = values.float().unflatten(3, (-1, 16))
    ordered = torch.empty_like(blocks)
    ordered[..., where] = blocks
    return ordered.flatten(3).mT


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check(call: Call, recipe: Recipe) -> None:
    """The pre-pass on poisoned memory beside the quantisers of the emulator."""
    plan = cuda_prepass.plan_of(replace(form_of(call, recipe), target=TARGET))
    scratch = torch.full((plan.scratch_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    plan.launch(call, scratch.data_ptr())
    codes = plan.codes(scratch)
    scores = None
    if codes.q_mean_log2 is not None:
        scores = prepass.mean_scores(call, codes.q_mean_log2, codes.k_mean, plan.kv_pad, TARGET)
        scores = scores.cpu()
    found = {
        name: None if t is None else t.cpu()
        for name in (
            "q8",
            "q_scale_log2",
            "k8",
            "k_scale",
            "vt8",
            "v_scale",
            "k_mean",
            "q_mean_log2",
        )
        for t in (getattr(codes, name),)
    }
    tensors = {name: getattr(call, name) for name in ("q", "k", "v")}
    mask = call.attn_mask
    call = replace(
        call,
        **{name: t.cpu().float() for name, t in tensors.items()},
        attn_mask=None if mask is None else mask.cpu(),
    )
    seen = seen_keys(call)
    keep = torch.tensor(True) if seen is None else seen[:, None, :, None]
    q, k, v = call.q, call.k, call.v
    Sq, Skv, D, Dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    factor = call.scale * LOG2E

    if recipe.smooth_q:
        # The order of a sum is nobody's specification: its value is, and everything behind it.
        means = found["q_mean_log2"]
        wanted = block_mean(q.double(), recipe.q_block)[:, :, :: recipe.q_block]
        size = block_mean(q.double().abs(), recipe.q_block)[:, :, :: recipe.q_block]
        assert bool(((means[..., :D] - wanted * factor).abs() <= 1e-6 * size * abs(factor)).all())
        assert not means[..., D:].any()
        centred = torch.where(keep, k - found["k_mean"][..., None, :D], 0.0).double()
        group = q.shape[1] // k.shape[1]
        expected = means[..., :D].double() @ centred.repeat_interleave(group, 1).mT
        bound = means[..., :D].double().abs() @ centred.abs().repeat_interleave(group, 1).mT
        visible = keep[:, :, None, :, 0] if seen is not None else keep
        off = (scores[..., :Skv] - expected).abs() > 1e-5 * bound + 1e-12
        assert not bool((off & visible).any())
        assert not scores[..., Skv:].any()
        # What was subtracted, before the factor; close enough that codes differ in ties only.
        mean = block_mean(q, recipe.q_block)
        q = q - mean
    groups = quantize.query_groups(Sq, recipe.q_granularity, recipe.q_block, CPU)
    q8 = quantize.to_integer(q, groups, recipe.qk_max)
    got = unpacked(found["q8"], recipe)
    if recipe.smooth_q:
        torch.testing.assert_close(
            found["q_scale_log2"], (q8.scale * factor)[..., 0], rtol=1e-6, atol=0
        )
        assert (got[..., :D] - q8.codes).abs().max() <= 1
        assert (got[..., :D] != q8.codes).float().mean() < 1e-4
    else:
        same(found["q_scale_log2"], (q8.scale * factor)[..., 0])
        same(got[..., :D], q8.codes)
    assert not got[..., D:].any()

    centred = torch.where(keep, k - found["k_mean"][..., None, :D], 0.0)
    groups = quantize.key_groups(Skv, recipe.k_granularity, recipe.k_block, CPU)
    k8 = quantize.to_integer(centred, groups, recipe.qk_max)
    scale = found["k_scale"]
    if recipe.k_granularity != "token":
        scale = scale[..., None, :, None].expand(*scale.shape[:3], 8, 4, 2).flatten(2)
    same(scale[..., :Skv], k8.scale[..., 0])
    got = unpacked(found["k8"], recipe)
    same(got[:, :, :Skv, :D], k8.codes)
    assert not got[:, :, Skv:].any()
    assert not got[..., D:].any()

    if recipe.pv == "int8":
        v8 = quantize.to_integer_per_channel(torch.where(keep, v, 0.0), 127)
        same(found["v_scale"][..., :Dv], v8.scale[..., 0, :])
        values = in_order(found["vt8"])
        same(values[:, :, :Skv, :Dv], v8.codes)
        assert not values[:, :, Skv:].any()
        assert not values[..., Dv:].any()


slow = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "dims",
    [(40, 72), *(pytest.param(dims, marks=slow) for dims in [(64, 64), (128, 33)])],
    ids=str,
)
def test_codes_and_scales(name, dims):
    check(make((2, 4, 2, 150, 201, *dims)), RECIPES[name])


@pytest.mark.parametrize("name", SMOOTHED)
@pytest.mark.parametrize(
    "sizes",
    [(300, 129), *(pytest.param(sizes, marks=slow) for sizes in [(1, 1), (128, 64)])],
    ids=str,
)
def test_means_of_blocks(name, sizes):
    check(make((1, 2, 1, *sizes, 64), dtype=torch.bfloat16), RECIPES[name])
    check(make((1, 2, 1, *sizes, 64), return_lse=True), RECIPES[name])


@pytest.mark.parametrize("name", SMOOTHED)
def test_hidden_keys_do_not_count(name):
    mask = torch.rand(2, 1, 1, 201, generator=torch.Generator().manual_seed(3)) < 0.6
    call = make((2, 2, 1, 150, 201, 64), attn_mask=mask.to(DEVICE))
    k = call.k.masked_fill(~mask.to(DEVICE).mT, float("nan"))
    check(replace(call, k=torch.where(k.isnan(), 1e3, k)), RECIPES[name])


@pytest.mark.parametrize("name", SMOOTHED)
def test_strides_of_keys(name):
    call = make((2, 2, 2, 140, 150, 64))
    plain = call.k
    for k in (plain.transpose(1, 2).contiguous().transpose(1, 2), plain.mT.contiguous().mT):
        check(replace(call, k=k), RECIPES[name])


@pytest.mark.parametrize("name", SMOOTHED)
def test_scores_of_packed_members(name):
    ends_q = torch.tensor([0, 5, 5, 205, 300], dtype=torch.int32, device=DEVICE)
    ends_k = torch.tensor([0, 130, 200, 205, 400], dtype=torch.int32, device=DEVICE)
    call = make((1, 2, 1, 300, 400, 64), cu_seqlens_q=ends_q, cu_seqlens_kv=ends_k)
    plan = cuda_prepass.plan_of(replace(form_of(call, RECIPES[name]), target=TARGET))
    scratch = torch.full((plan.scratch_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    plan.launch(call, scratch.data_ptr())
    codes = plan.codes(scratch)
    assert codes.q_mean_log2 is not None
    scores = prepass.mean_scores(call, codes.q_mean_log2, codes.k_mean, plan.kv_pad, TARGET)
    for i, member in enumerate(members(call)):
        start_q, start_k = int(ends_q[i]) // 128 + i, (int(ends_k[i]) // 128 + i) * 128
        Sq, Skv = member.q.shape[2], member.k.shape[2]
        blocks = -(-Sq // 128)
        q_mean = block_mean(member.q.float(), 128)[:, :, ::128] * (call.scale * LOG2E)
        k = (member.k.float() - codes.k_mean[i, None, :, None, :64]).repeat_interleave(2, 1)
        got = scores[:, :, start_q : start_q + blocks, start_k : start_k + Skv]
        torch.testing.assert_close(got, q_mean @ k.mT, rtol=1e-4, atol=1e-4)
