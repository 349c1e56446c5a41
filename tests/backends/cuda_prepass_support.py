"""The CUDA pre-pass beside the emulator: calls, the pre-pass on poisoned memory, and every tensor
that it leaves held to the arithmetic of the emulator, bit for bit, given the mean of K.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from sagepatch.backends.cuda.prepass import Codes, plan_of
from sagepatch.backends.cuda.prepass_form import PAD, form_of
from sagepatch.numerics import quantize
from sagepatch.numerics.exact import members
from sagepatch.numerics.masks import seen_keys
from sagepatch.numerics.prepass import LOG2E, MOST_K_SCALE, MOST_Q_SCALE
from sagepatch.numerics.recipe import Recipe
from sagepatch.numerics.smooth import masked_mean
from sagepatch.spec import Call

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
CPU = torch.device("cpu")
POISON = 0xFF
GUARD_BYTES = 1 << 14


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A call of shape (B, Hq, Hkv, Sq, Skv, D, Dv); keys have an offset of each channel."""
    B, Hq, Hkv, Sq, Skv, D, Dv = shape
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, Sq, D, generator=gen)
    k = torch.randn(B, Hkv, Skv, D, generator=gen) + 2 * torch.randn(1, Hkv, 1, D, generator=gen)
    v = torch.randn(B, Hkv, Skv, Dv, generator=gen) * torch.rand(1, Hkv, 1, Dv, generator=gen)
    options.setdefault("scale", D**-0.5)
    return Call(*(t.to(DEVICE, dtype) for t in (q, k, v)), **options)


def run(call: Call, recipe: Recipe, *, raw_v: bool = False) -> Codes:
    """The pre-pass on poisoned memory; what lies behind it must stay as it was."""
    plan = plan_of(form_of(call, recipe, raw_v=raw_v))
    size = plan.scratch_bytes
    scratch = torch.full((size + GUARD_BYTES,), POISON, dtype=torch.uint8, device=DEVICE)
    plan.launch(call, scratch.data_ptr())
    assert scratch[size:].eq(POISON).all()
    return plan.codes(scratch[:size])


def keys_in_order(codes: Codes) -> Tensor:
    """Codes of V as [B, Hkv, Nkp, D8] fp32, the order of keys undone."""
    if codes.vt8 is None:
        assert codes.v16 is not None
        return codes.v16.float()
    where = torch.tensor([2 * t + (j & 1) + 8 * (j >> 1) for t in range(4) for j in range(4)])
    blocks = codes.vt8.float().unflatten(3, (-1, 16))
    ordered = torch.empty_like(blocks)
    ordered[..., where.to(blocks.device)] = blocks
    return ordered.flatten(3).mT


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def on_cpu(value: Any) -> Any:
    """A call or codes with all their tensors on the CPU."""
    moved = {
        f.name: getattr(value, f.name).cpu()
        for f in fields(value)
        if isinstance(getattr(value, f.name), Tensor)
    }
    return replace(value, **moved)


def check(call: Call, recipe: Recipe) -> Codes:
    """Hold every tensor of the pre-pass to the emulator's arithmetic, the CPU's: on a GPU torch
    multiplies by the reciprocal of a number that it is to divide by.
    """
    found = run(call, recipe)
    check_on_cpu(on_cpu(call), recipe, on_cpu(found))
    return found


def check_on_cpu(call: Call, recipe: Recipe, codes: Codes) -> None:
    if call.packed:
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_kv is not None
        q_at, k_at = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
        rows = codes.k8.shape[2]
        starts = [k // PAD * PAD + i * PAD for i, k in enumerate(k_at[:-1])]
        for i, member in enumerate(members(call)):
            stop = [*starts, rows][i + 1]
            check_member(
                member, recipe, cut(codes, slice(q_at[i], q_at[i + 1]), slice(starts[i], stop), i)
            )
    else:
        check_member(call, recipe, codes)


def cut(codes: Codes, queries: slice, keys: slice, member: int) -> Codes:
    """The codes of one packed member."""
    per = codes.k8.shape[2] // codes.k_scale.shape[2]
    scales = slice(keys.start // per, keys.stop // per)
    one = slice(member, member + 1)
    return replace(
        codes,
        q8=codes.q8[:, :, queries],
        q_scale_log2=codes.q_scale_log2[:, :, queries],
        k8=codes.k8[:, :, keys],
        k_scale=codes.k_scale[:, :, scales],
        vt8=None if codes.vt8 is None else codes.vt8[..., keys],
        v16=None if codes.v16 is None else codes.v16[:, :, keys],
        v_scale=codes.v_scale[one],
        k_mean=codes.k_mean[one],
        k_norm=None if codes.k_norm is None else codes.k_norm[one],
        shift_log2=None if codes.shift_log2 is None else codes.shift_log2[:, :, queries],
    )


def check_member(call: Call, recipe: Recipe, codes: Codes) -> None:
    q, k, v = (t.float() for t in (call.q, call.k, call.v))
    Sq, Skv, D, Dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    factor = call.scale * LOG2E
    seen = seen_keys(call)
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=CPU)
    if seen is not None:
        keep = seen[:, None, :, None]
    # The order of a sum is nobody's specification: its value is, and everything behind it.
    mean = codes.k_mean[..., None, :D]
    wanted = masked_mean(k.double(), seen)
    size = masked_mean(k.double().abs(), seen).nan_to_num(posinf=1.0) + 1e-30
    close = ((mean - wanted).abs() <= 2e-6 * size) | ~wanted.isfinite()
    assert bool(close.all())
    assert torch.equal(mean.isfinite(), wanted.isfinite())
    assert not codes.k_mean[..., D:].any()

    q_groups = quantize.query_groups(Sq, recipe.q_granularity, recipe.q_block, CPU)
    q8 = quantize.to_integer(q, q_groups, recipe.qk_max)
    q_scale = (q8.scale * factor).clamp(-MOST_Q_SCALE, MOST_Q_SCALE)[..., 0]
    same(codes.q_scale_log2, q_scale.abs())
    sign = -1 if factor < 0 else 1
    sound = q_scale.isfinite()[..., None]
    same(torch.where(sound, codes.q8[..., :D].float(), 0), torch.where(sound, q8.codes * sign, 0))
    assert not codes.q8[..., D:].any()

    centred = torch.where(keep, k - mean, 0.0)
    k_groups = quantize.key_groups(Skv, recipe.k_granularity, recipe.k_block, CPU)
    k8 = quantize.to_integer(centred, k_groups, recipe.qk_max)
    k_scale = k8.scale.clamp(max=MOST_K_SCALE)[..., 0]
    found = codes.k_scale
    if recipe.k_granularity != "token":
        # [.., blocks of 64, 4] to one a key
        found = found[..., None, :, None].expand(*found.shape[:3], 8, 4, 2).flatten(2)
    same(found[..., :Skv], k_scale)
    sound = k_scale.isfinite()[..., None]
    same(torch.where(sound, codes.k8[:, :, :Skv, :D].float(), 0), torch.where(sound, k8.codes, 0))
    assert not codes.k8[:, :, Skv:].any()
    assert not codes.k8[..., D:].any()

    if codes.k_norm is not None:
        lengths = (k8.codes.square().sum(3) * k_scale.square()).amax(2)
        lengths = torch.where(k_scale.isnan().any(2), torch.nan, lengths)
        found = torch.where(codes.k_norm.isnan(), torch.nan, codes.k_norm)
        torch.testing.assert_close(found, lengths, rtol=1e-5, atol=0, equal_nan=True)

    v = torch.where(keep, v, 0.0)
    if recipe.pv == "fp16":
        v8 = quantize.to_float16_per_channel(v, recipe.v_range)
    elif recipe.pv == "bf16":
        v8 = quantize.to_bfloat16(v)
    else:
        v8 = quantize.to_float8_per_channel(v, recipe.v_range, torch.float8_e4m3fn)
    same(codes.v_scale[..., :Dv], v8.scale[..., 0, :].expand(codes.v_scale[..., :Dv].shape))
    assert not codes.v_scale[..., Dv:].any()
    values = keys_in_order(codes)
    same(values[:, :, :Skv, :Dv], v8.codes)
    finite = v8.scale.isfinite()
    assert not torch.where(finite, values[:, :, Skv:, :Dv], 0).any()
    assert not values[..., Dv:].any()

    if codes.shift_log2 is not None:
        group = q.shape[1] // k.shape[1]
        heads = mean.double().repeat_interleave(group, 1)
        shift = (q.double() * heads).sum(3) * factor
        bound = 4e-6 * (q.double() * heads).abs().sum(3) * abs(factor) + 1e-30
        assert bool((((codes.shift_log2 - shift).abs() <= bound) | ~shift.isfinite()).all())
    if codes.key_bits is not None:
        assert seen is not None
        assert codes.kv_len is not None
        bits = codes.key_bits[..., None] >> torch.arange(32, device=CPU) & 1
        bits = bits.flatten(1)
        assert torch.equal(bits[:, :Skv].bool(), seen)
        assert not bits[:, Skv:].any()
        last = torch.where(seen, torch.arange(1, Skv + 1, device=CPU), 0).amax(1)
        assert torch.equal(codes.kv_len.long(), last)


def key_mask(B: int, Skv: int, *, batches: int | None = None, seed: int = 0) -> Tensor:
    """A mask of keys [B or 1, 1, 1, Skv] with holes and a hidden end."""
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(batches or B, 1, 1, Skv, generator=gen) < 0.7
    mask[..., Skv - Skv // 3 :] = False
    return mask.to(DEVICE)
