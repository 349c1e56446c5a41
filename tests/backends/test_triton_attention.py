"""The Triton kernels against their emulators: every recipe, shape, option and layout of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_calls import poison
from kernel_contract import error_does_not_grow_with_length
from triton_support import DEVICE, DTYPE, ON_GPU, check, make, needs_kernels, tensors

pytestmark = needs_kernels

from sagepatch.backends.catalogue import TRITON  # noqa: E402
from sagepatch.backends.triton import attention  # noqa: E402
from sagepatch.errors import InvalidArgument  # noqa: E402
from sagepatch.numerics.attention import exact  # noqa: E402
from sagepatch.numerics.metrics import compare  # noqa: E402
from sagepatch.numerics.recipe import RECIPES  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

ALL = [variant.recipe for variant in TRITON]
CORE = [RECIPES[name] for name in ("sage2_8", "sage2_8b_k128", "sage1_b", "sage1_vt", "sage2_4")]
FEW = CORE[:3] if ON_GPU else [RECIPES["sage2_8"]]
every_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
core = pytest.mark.parametrize("recipe", CORE if ON_GPU else CORE[:3], ids=lambda r: r.name)
few = pytest.mark.parametrize("recipe", FEW, ids=lambda r: r.name)


@every_recipe
def test_every_recipe_equals_its_emulator(recipe):
    check(make((1, 4, 2, 70, 150, 40, 24)), recipe)


LENGTHS = [(1, 1), (2, 9), (9, 65), (63, 127), (65, 129), (128, 64), (129, 191), (130, 255)]
if ON_GPU:
    LENGTHS += [(a, b) for a in (1, 64, 127, 1001) for b in (1, 9, 128, 192, 193, 503)]


# case 1, case 2: tails of every size, memory poisoned first
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@few
def test_odd_lengths(recipe, lengths):
    call = make((1, 2, 2, *lengths, 64))
    check(call, recipe)
    first, _ = attention.run(call, recipe)
    poison(call)
    again, _ = attention.run(call, recipe)
    assert torch.equal(first, again)  # two runs agree to the bit


# One key: no length may become a constant there (kernel.py says why).
@pytest.mark.parametrize("dim", [24, 40, 64, 80, 128, 160] if ON_GPU else [24])
@pytest.mark.parametrize("recipe", ALL if ON_GPU else FEW, ids=lambda r: r.name)
def test_one_key(recipe, dim):
    for q_len, options in ((1, {}), (3, {"causal_offset": 0}), (70, {"window": 1})):
        if "window" in options:
            options = {**options, "causal_offset": 3}
        call = make((2, 2, 1, q_len, 1, dim), **options)
        check(call, recipe)
        first, _ = attention.run(call, recipe)
        poison(call)
        again, _ = attention.run(call, recipe)
        assert torch.equal(first, again)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    check(make((1, 2, 1, 1, 1, dim), cu_seqlens_q=ends, cu_seqlens_kv=ends), recipe)


# case 5: head sizes that are no powers of two
@pytest.mark.parametrize(
    "dim", [8, 32, 40, 72, 80, 96, 112, 120, 160, 192, 256] if ON_GPU else [8, 72, 112, 160]
)
@few
def test_head_sizes(recipe, dim):
    check(make((1, 2, 1, 70, 140, dim)), recipe)


# case 12: values of another size
@pytest.mark.parametrize("dims", [(64, 32), (64, 128), (192, 128), (40, 96)], ids=str)
@few
def test_value_size_of_its_own(recipe, dims):
    check(make((1, 2, 1, 70, 140, *dims)), recipe)


# case 6: the caller's scale, a negative one too
@pytest.mark.parametrize("scale", [1.0, 0.0625, 2.0, 0.0, -0.1])
@few
def test_scale_is_the_callers(recipe, scale):
    check(make((1, 2, 2, 66, 100, 64), scale=scale), recipe)


# case 15
@pytest.mark.parametrize("lengths", [(400, 77), (1, 300), (200, 1), (5, 0)], ids=str)
@few
def test_cross_attention_lengths(recipe, lengths):
    call = make((2, 2, 2, *lengths, 64))
    out, _ = check(call, recipe)
    if lengths[1] == 1:
        assert compare(out.float(), call.v.float().expand_as(out)).worst.cosine > 0.999
    if lengths[1] == 0:
        assert not out.any()


# case 11: the head map shows in the output when every kv head holds its own constant
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@few
def test_query_heads_share_key_heads_in_blocks(recipe, kv_heads):
    q, k, v = tensors(1, 8, kv_heads, 40, 50, 64)
    v = torch.arange(1, kv_heads + 1, device=DEVICE, dtype=DTYPE).view(1, -1, 1, 1).expand_as(v)
    out, _ = attention.run(Call(q, k, v, 0.125), recipe)
    expected = v.repeat_interleave(8 // kv_heads, 1)[:, :, :1].expand_as(out)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0)


CAUSAL = [
    (70, 70, 0, None),
    (70, 130, 60, None),
    (130, 70, -60, None),
    (130, 130, 0, 8),
    (140, 300, 160, 100),
    (20, 20, -30, None),
    (5, 300, 295, 1),
    (70, 130, 2**31 - 1, None),
    (130, 70, -60, 2**31 - 1),
]


# case 42 for the windows
@pytest.mark.parametrize("case", CAUSAL, ids=str)
@core
def test_causal_offsets_and_windows(recipe, case):
    Sq, Skv, offset, window = case
    check(make((1, 2, 1, Sq, Skv, 64), causal_offset=offset, window=window), recipe)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@core
def test_softcap_and_sinks_get_the_mean_back(recipe, softcap, sinks):
    sink = torch.tensor([1.5, -2.0, 0.0, 5.0], device=DEVICE) if sinks else None
    call = make((2, 4, 2, 70, 130, 64), softcap=softcap, sinks=sink, causal_offset=10)
    check(call, recipe)


@pytest.mark.parametrize("softcap", [1e3, 1e5, 1e7])
def test_large_softcaps_keep_their_precision(softcap):
    check(make((1, 2, 2, 64, 64, 64), softcap=softcap), RECIPES["sage2_8"])


def test_sinks_with_gaps_in_memory():
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(3)).to(DEVICE)[::2]
    check(make((2, 4, 2, 70, 90, 64), sinks=sinks), RECIPES["sage2_8"])


# case 9: LSE of unsmoothed scores, [B, H, Sq], and output orders; case 10: Sq == H
@pytest.mark.parametrize("shape", [(2, 8, 2, 130, 60, 64), (1, 8, 8, 8, 8, 64)], ids=str)
@few
def test_memory_orders(recipe, shape):
    call = make(shape, bshd_out=True)
    out, _ = check(call, recipe)
    assert out.transpose(1, 2).is_contiguous()
    plain, _ = attention.run(replace(call, bshd_out=False), recipe)
    assert plain.is_contiguous()
    assert torch.equal(plain, out)


def _strided(kind, t):
    if kind == "tokens_first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "last_stride":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "every_other":
        return t.repeat_interleave(2, 2)[:, :, ::2]
    if kind == "batch_stride_0":
        return t[:1].expand(2, -1, -1, -1)
    odd = (7, *t[:1].contiguous().stride()[1:])
    return t[:1].contiguous().as_strided(t[:1].shape, odd)


# case 7
@pytest.mark.parametrize(
    "kind", ["tokens_first", "last_stride", "every_other", "batch_stride_0", "odd_batch_stride"]
)
@few
def test_strides_are_read_as_they_are(recipe, kind):
    q, k, v = (_strided(kind, t) for t in tensors(2, 2, 2, 70, 90, 64))
    before = [t.clone() for t in (q, k, v)]
    out, _ = attention.run(Call(q, k, v, 0.125), recipe)
    plain, _ = attention.run(Call(*(t.contiguous() for t in (q, k, v)), 0.125), recipe)
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


# case 4
@pytest.mark.parametrize("shape", [(65536, 1, 1, 16, 16, 40), (1, 65536, 65536, 10, 10, 64)])
@pytest.mark.skipif(not ON_GPU, reason="65,536 programs are too many for the interpreter")
@few
def test_more_heads_than_a_grid_axis(recipe, shape):
    call = make(shape)
    out, _ = attention.run(call, recipe)
    assert bool(out.isfinite().all())
    axis = 0 if shape[0] > 1 else 1
    for part in (slice(0, 8), slice(-8, None)):
        at = (part,) if axis == 0 else (slice(None), part)
        few_heads = Call(call.q[at], call.k[at], call.v[at], call.scale)
        torch.testing.assert_close(out[at], check(few_heads, recipe)[0], rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("lengths", [([0, 1, 0, 130], [0, 3, 0, 77]), ([64, 70], [200, 5])])
@pytest.mark.parametrize("causal", [None, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@core
def test_packed_members_equal_their_own_calls(recipe, lengths, causal, dtype):
    # case 16
    if not ON_GPU and (dtype == torch.int64) == (causal is None):
        pytest.skip("half of the combinations are enough for the interpreter")
    q_lens, k_lens = lengths
    call = make(
        (1, 4, 2, sum(q_lens), sum(k_lens), 64),
        causal_offset=causal,
        cu_seqlens_q=_offsets(q_lens, dtype),
        cu_seqlens_kv=_offsets(k_lens, dtype),
    )
    out, lse = check(call, recipe)
    q_at = k_at = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        member = Call(
            call.q[:, :, q_at : q_at + q_len],
            call.k[:, :, k_at : k_at + k_len],
            call.v[:, :, k_at : k_at + k_len],
            call.scale,
            causal_offset=causal,
            return_lse=True,
        )
        own, own_lse = attention.run(member, recipe)
        torch.testing.assert_close(out[:, :, q_at : q_at + q_len], own, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(lse[:, :, q_at : q_at + q_len], own_lse, rtol=1e-4, atol=1e-4)
        q_at, k_at = q_at + q_len, k_at + k_len


def _offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(dtype)


# case 17: one mean a member
@few
def test_packed_members_have_their_own_mean(recipe):
    q, k, v = tensors(1, 2, 2, 256, 256, 64)
    direction = torch.randn(64, generator=torch.Generator().manual_seed(5)).to(DEVICE, DTYPE)
    k = torch.cat([k[:, :, :128] + 40 * direction, k[:, :, 128:] - 40 * direction], 2)
    cu = _offsets([128, 128])
    call = Call(q, k, v, 0.125, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    out, _ = attention.run(call, recipe)
    assert compare(out.float(), exact(call)[0]).worst.cosine > 0.998


def test_a_nan_stays_in_its_member():
    q, k, v = tensors(1, 2, 2, 100, 100, 64)
    for t in (k, v):
        t[:, :, 50:] = float("nan")
    cu = _offsets([50, 50])
    call = Call(q, k, v, 0.125, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    out, _ = attention.run(call, RECIPES["sage2_8"])
    assert bool(out[:, :, :50].isfinite().all())
    assert bool(out[:, :, 50:].isnan().all())


@pytest.mark.parametrize("change", [{"rotate": True}, {"smooth_v": True}])
def test_arithmetic_that_it_lacks_is_refused(change):
    with pytest.raises(InvalidArgument, match="does not have"):
        attention.run(make((1, 1, 1, 8, 8, 32)), replace(RECIPES["sage2_8"], **change))


# case 28: length, on the GPU alone
@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="200,000 tokens")
@pytest.mark.parametrize("name", ["sage2_8b_k128", "sage1_b"])
def test_error_does_not_grow_with_length(name):
    error_does_not_grow_with_length(attention.run, RECIPES[name], DEVICE)


@pytest.mark.slow
@pytest.mark.skipif(not ON_GPU, reason="9 GB of inputs")
def test_offsets_beyond_31_bits():
    q, k, v = tensors(1, 1, 1, 256, 256, 128)
    # The last tokens of a buffer of 2^31 elements and more, by strides.
    stride = (1 << 31) // 200
    big = torch.zeros(255 * stride + 128, device=DEVICE, dtype=DTYPE)
    far = big.as_strided((1, 1, 256, 128), (0, 0, stride, 1))
    far.copy_(k)
    out, _ = attention.run(Call(q, far, v, 0.1), RECIPES["sage2_8"])
    plain, _ = attention.run(Call(q, k, v, 0.1), RECIPES["sage2_8"])
    assert torch.equal(out, plain)
