"""The CUDA pre-pass against the emulator: the same codes and scales, bit for bit, given the mean of
K; memory poisoned, odd sizes, any strides. On a Hopper GPU, or else its source on the CPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

import cuda_on_cpu
from cuda_prepass_support import DEVICE, ON_GPU, check, key_mask, keys_in_order, make, run

from sagepatch.backends.cuda import prepass
from sagepatch.backends.cuda.prepass import WGMMA_RECIPES, plan_of
from sagepatch.numerics.recipe import RECIPES

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or cuda_on_cpu.available()), reason="needs a Hopper GPU or g++ 12"
)
SERVED = list(WGMMA_RECIPES)
# Each of them is compiled: where the CPU stands in, the quick tests take few.
SAMPLE = [RECIPES["sage2_8"], RECIPES["sage1_b"], RECIPES["sage2_8_bf16"]]
RUN = SERVED if ON_GPU else SAMPLE
HEAD_DIMS = [(8, 8), (40, 40), (64, 128), (72, 72), (80, 80), (84, 76), (96, 33), (128, 64)]
HEAD_DIMS += [(160, 160), (192, 128), (256, 256)]
HEAD_DIMS_RUN = HEAD_DIMS if ON_GPU else [(40, 40), (84, 76), (192, 256)]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = list(itertools.product(FLOATS, repeat=2)) if ON_GPU else [(FLOATS[1], FLOATS[2])]
NAMES = ["sage2_8", "sage2_8b_k128", "sage1_b", "sage1_t"] if ON_GPU else ["sage2_8", "sage1_b"]


@pytest.fixture(autouse=True)
def _kernels_here(request, monkeypatch):
    """Without a GPU the source runs on the CPU."""
    if not ON_GPU:
        monkeypatch.setattr(prepass, "load", cuda_on_cpu.load)
    plan_of.cache_clear()


@needs_kernels
@pytest.mark.parametrize("recipe", RUN, ids=lambda r: r.name)
def test_every_recipe(recipe):
    check(make((2, 4, 2, 200, 333, 64, 64)), recipe)
    check(make((1, 2, 1, 130, 300, 128, 128), return_lse=True), recipe)


@needs_kernels
@pytest.mark.parametrize("lse", [False, True])
def test_values_that_the_attention_reads_itself_are_left_alone(lse):
    recipe = RECIPES["sage2_8_bf16"]
    call = make((2, 4, 2, 200, 333, 64, 128), return_lse=lse)
    found = run(call, recipe, raw_v=True)
    expected = check(call, recipe)
    assert found.v16 is found.v_scale is None
    for name in ("q8", "q_scale_log2", "k8", "k_scale", "k_mean", "k_norm", "shift_log2"):
        one, other = getattr(found, name), getattr(expected, name)
        assert other is None if one is None else torch.equal(one, other)


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
