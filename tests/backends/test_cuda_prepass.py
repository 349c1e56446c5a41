"""The CUDA pre-pass against the emulator: the same codes and scales, bit for bit, given the mean of
K; memory poisoned, odd sizes, any strides. On a Hopper GPU, or else its source on the CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc")

import cuda_on_cpu

from sagepatch.backends.cuda import build, prepass
from sagepatch.backends.cuda.launch import Layout
from sagepatch.backends.cuda.prepass import (
    KEYS_AND_VALUES,
    MOST_CHUNKS,
    QUERIES,
    WGMMA_RECIPES,
    Codes,
    _chunks,
    divisor,
    instances,
    plan_of,
    prepare,
)
from sagepatch.backends.cuda.prepass_form import PAD, form_of
from sagepatch.errors import InvalidArgument
from sagepatch.numerics import quantize
from sagepatch.numerics.exact import members
from sagepatch.numerics.masks import seen_keys
from sagepatch.numerics.prepass import LOG2E, MOST_K_SCALE, MOST_Q_SCALE
from sagepatch.numerics.recipe import RECIPES, Recipe
from sagepatch.numerics.smooth import masked_mean
from sagepatch.spec import Call

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or cuda_on_cpu.available()), reason="needs a Hopper GPU or g++ 12"
)
SERVED = list(WGMMA_RECIPES)
# Each of them is compiled: where the CPU stands in, the quick tests take few.
SAMPLE = [RECIPES["sage2_8"], RECIPES["sage1_b"]]
RUN = SERVED if ON_GPU else SAMPLE
HEAD_DIMS = [(8, 8), (40, 40), (64, 128), (72, 72), (80, 80), (84, 76), (96, 33), (128, 64)]
HEAD_DIMS += [(160, 160), (192, 128), (256, 256)]
HEAD_DIMS_RUN = HEAD_DIMS if ON_GPU else [(40, 40), (84, 76), (192, 256)]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = list(itertools.product(FLOATS, repeat=2)) if ON_GPU else [(FLOATS[1], FLOATS[2])]
NAMES = ["sage2_8", "sage2_8b_k128", "sage1_b", "sage1_t"] if ON_GPU else ["sage2_8", "sage1_b"]
POISON = 0xFF
GUARD_BYTES = 1 << 14


@pytest.fixture(autouse=True)
def _kernels_here(request, monkeypatch):
    """Without a GPU the source runs on the CPU."""
    if not ON_GPU:
        monkeypatch.setattr(prepass, "load", cuda_on_cpu.load)
    plan_of.cache_clear()


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


def run(call: Call, recipe: Recipe) -> Codes:
    """The pre-pass on poisoned memory; what lies behind it must stay as it was."""
    plan = plan_of(form_of(call, recipe))
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

    v = torch.where(keep, v, 0.0)
    if recipe.pv == "fp16":
        v8 = quantize.to_float16_per_channel(v, recipe.v_range)
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


# ---- run


@needs_kernels
@pytest.mark.parametrize("recipe", RUN, ids=lambda r: r.name)
def test_every_recipe(recipe):
    check(make((2, 4, 2, 200, 333, 64, 64)), recipe)
    check(make((1, 2, 1, 130, 300, 128, 128), return_lse=True), recipe)


@needs_kernels
@pytest.mark.parametrize("name", ["sage2_8", "sage1_t"])
@pytest.mark.parametrize("dims", HEAD_DIMS_RUN, ids=str)
def test_head_sizes(name, dims):
    check(make((1, 2, 2, 150, 131, *dims)), RECIPES[name])


@needs_kernels
@pytest.mark.parametrize("sizes", [(1, 1), (1, 127), (63, 128), (129, 129), (65, 1025), (7, 4097)])
@pytest.mark.parametrize("name", NAMES)
def test_token_counts(sizes, name):
    check(make((2, 2, 1, *sizes, 64, 64), return_lse=True), RECIPES[name])


@needs_kernels
@pytest.mark.parametrize("types", DTYPES, ids=str)
def test_dtypes_mix(types):
    first, second = types
    call = make((1, 2, 2, 100, 150, 64, 64), torch.float32)
    call = replace(call, q=call.q.to(first), k=call.k.to(second), v=call.v.to(first))
    for name in ("sage2_8", "sage1_b_f32"):
        check(call, RECIPES[name])


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_strides(name):
    recipe = RECIPES[name]
    call = make((2, 3, 3, 140, 150, 64, 64))
    plain = check(call, recipe)
    bshd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (call.q, call.k, call.v)]
    by_channel = [t.mT.contiguous().mT for t in (call.q, call.k, call.v)]
    fused = torch.cat(
        [t.transpose(1, 2) for t in (call.q, call.k[:, :, :140], call.v[:, :, :140])], 3
    )
    apart = [t.transpose(1, 2) for t in fused.split(64, 3)]
    shifted = [torch.nn.functional.pad(t, (1, 0))[..., 1:] for t in (call.q, call.k, call.v)]
    for q, k, v in (bshd, by_channel, shifted):
        codes = check(replace(call, q=q, k=k, v=v), recipe)
        assert torch.equal(codes.q8, plain.q8)
        assert torch.equal(keys_in_order(codes), keys_in_order(plain))
    check(replace(call, q=apart[0], k=apart[1], v=apart[2]), recipe)
    one = replace(call, k=call.k[:, :1].expand(2, 3, 150, 64), v=call.v[:1].expand(2, 3, 150, 64))
    check(one, recipe)
    check(replace(call, q=call.q.flip(2)[:, :, ::2]), recipe)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batches", [1, 3])
def test_key_masks(name, batches):
    call = make((3, 2, 1, 70, 515, 64, 64), return_lse=True)
    mask = key_mask(3, 515, batches=batches)
    mask[0, ..., :130] = False
    k, v = call.k.clone(), call.v.clone()
    hidden = ~mask[:, 0, 0].expand(3, 515)
    k.transpose(1, 2)[hidden] = float("nan")
    v.transpose(1, 2)[hidden] = float("inf")
    check(replace(call, k=k, v=v, attn_mask=mask), RECIPES[name])
    nothing = torch.zeros_like(mask)
    codes = check(replace(call, k=k, v=v, attn_mask=nothing), RECIPES[name])
    assert codes.kv_len is not None
    assert codes.kv_len.tolist() == [0, 0, 0]
    assert not codes.k8.any()
    assert not codes.k_scale.any()
    assert not keys_in_order(codes).any()


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_packed_members(name):
    q_lengths, k_lengths = [1, 130, 0, 257, 64], [5, 128, 300, 1, 129]
    total_q, total_k = sum(q_lengths), sum(k_lengths)
    call = make((1, 2, 1, total_q, total_k, 64, 64), return_lse=True)

    def offsets(lengths):
        ends = list(itertools.accumulate(lengths, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device=DEVICE)

    packed = replace(
        call, cu_seqlens_q=offsets(q_lengths), cu_seqlens_kv=offsets(k_lengths), return_lse=True
    )
    check(packed, RECIPES[name])
    check(replace(packed, return_lse=False), RECIPES[name])


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_numbers_make_their_scales_nan(name, bad):
    call = make((1, 2, 2, 140, 200, 64, 64), return_lse=True)
    for which in ("q", "k", "v"):
        tensor = getattr(call, which).clone()
        tensor[0, 1, 5, 7] = bad
        codes = check(replace(call, **{which: tensor}), RECIPES[name])
        head = {"q": codes.q_scale_log2, "k": codes.k_scale, "v": codes.v_scale}[which]
        if which == "v" and name != "sage2_8" and bad != bad:
            assert head[0, 1, 7].isnan()
        elif which != "v":
            assert head[0, 1].isnan().any()
        assert head[0, 0].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("recipe", RUN, ids=lambda r: r.name)
def test_zeros_tiny_and_huge_numbers(recipe):
    call = make((1, 2, 2, 140, 200, 64, 64), torch.float32)
    q, k, v = call.q.clone(), call.k.clone(), call.v.clone()
    q[0, 0, 3], q[0, 0, 4], q[0, 0, 5] = 0, 1e-36, 1e30
    k[:, 0] = 0
    v[..., 3], v[..., 4], v[..., 5] = 0, 1e-36, v[..., 5] * 3e5
    check(replace(call, q=q, k=k, v=v), recipe)
    check(replace(call, k=k * 0 + 3.25), recipe)
    check(replace(call, scale=-0.3), recipe)
    check(replace(call, scale=0.0), recipe)


@needs_gpu
def test_runs_repeat_bit_for_bit():
    call = make((2, 4, 4, 1000, 3000, 128, 128), return_lse=True)
    first = run(call, RECIPES["sage2_8"])
    for _ in range(5):
        again = run(call, RECIPES["sage2_8"])
        assert torch.equal(again.k_mean, first.k_mean)
        assert torch.equal(again.k8, first.k8)
        assert torch.equal(again.shift_log2, first.shift_log2)


@needs_gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits():
    # One head of 200k tokens lies 2^31 elements behind the first.
    D, S = 64, 200_000
    room = torch.zeros((1 << 31) + S * D, dtype=torch.bfloat16, device=DEVICE)
    call = make((1, 2, 2, 300, S, D, D))
    k = torch.as_strided(room, (1, 2, S, D), (0, 1 << 31, D, 1))
    k.copy_(call.k)
    check(replace(call, k=k), RECIPES["sage2_8"])


@needs_kernels
@pytest.mark.slow
def test_fuzz():
    gen = torch.Generator().manual_seed(3)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=gen))]

    for seed in range(20 if ON_GPU else 4):
        D = pick(16, 40, 64, 72, 100, 128)
        Dv = pick(D, D, 32, 80)
        recipe, dtype = pick(*SERVED), pick(torch.bfloat16, torch.float16)
        lse, masked = pick(True, False), pick(True, False)
        for again in range(15):
            kv_heads = pick(1, 2, 3)
            B, group = pick(1, 2, 3), pick(1, 2)
            sizes = (pick(1, 17, 128, 300), pick(1, 60, 128, 129, 700, 2000))
            shape = (B, kv_heads * group, kv_heads, *sizes, D, Dv)
            call = make(shape, dtype, 100 * seed + again, return_lse=lse)
            if masked:
                call = replace(call, attn_mask=key_mask(B, sizes[1], seed=seed))
            check(call, recipe)


# ---- compiled only


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
@pytest.mark.parametrize("name", NAMES)
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
