"""Hard numbers on the mma.sync kernels: zero channels, the FP16 range, offsets of keys, huge
scores, infinities, mixed types, members of a packed call. On a GPU, or else their source on the
CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from kernel_contract import (
    equal_values_come_out_as_they_are,
    error_does_not_grow_with_length,
    zero_channels_come_out_zero,
)
from mma_support import (
    DEVICE,
    ON_GPU,
    RUNS,
    WHY_NOT,
    check,
    each,
    kernels_here,  # noqa: F401
    make,
    run,
)

from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

pytestmark = [
    pytest.mark.skipif(not RUNS, reason=WHY_NOT),
    pytest.mark.usefixtures("kernels_here"),
]
recipes = pytest.mark.parametrize("name", each(["sage2_8"]))
slow = pytest.mark.slow


# case 25: a channel of zeros, everything zero
@recipes
def test_zero_channels_come_out_zero(name):
    zero_channels_come_out_zero(run, make((1, 2, 2, 66, 100, 64)), RECIPES[name])


# case 26: V beyond FP16
@slow
@recipes
def test_values_beyond_the_fp16_range_stay_finite(name):
    call = make((1, 2, 2, 66, 130, 64), dtype=torch.bfloat16)
    check(replace(call, v=call.v * 1e5), RECIPES[name])
    equal_values_come_out_as_they_are(run, call, RECIPES[name])


# case 29: keys with a common offset
@pytest.mark.parametrize("c", [pytest.param(4, marks=slow), pytest.param(16, marks=slow), 64])
@recipes
def test_common_offset_of_keys_is_smoothed_away(name, c):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 128, 64, generator=gen) for _ in range(3))
    k = k + c * torch.randn(64, generator=gen)
    call = Call(*(t.to(DEVICE, torch.float16) for t in (q, k, v)), 0.125)
    out, _ = run(call, RECIPES[name])
    least = 0.998 if RECIPES[name].qk_bits == 8 else 0.98
    assert compare(out.float(), exact(call)[0]).worst.cosine >= least


# case 30: finite but very large logits
@recipes
def test_huge_logits_stay_finite(name):
    recipe = RECIPES[name]
    call = make((1, 2, 2, 66, 130, 64))
    out, _ = run(replace(call, q=call.q * 300, k=call.k * 300, scale=1.0), recipe)
    assert out.isfinite().all()
    big = replace(call, q=torch.full_like(call.q, 1e4), k=torch.full_like(call.k, 1e4), scale=1.0)
    out, _ = run(big, recipe)
    assert out.isfinite().all()
    lowest = torch.full((66, 130), torch.finfo(torch.float32).min, device=DEVICE)
    out, _ = run(replace(big, q=-big.q, attn_mask=lowest), recipe)
    assert out.isfinite().all()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@recipes
def test_infinities_reach_the_output(name, which):
    call = make((1, 2, 2, 66, 130, 64))
    getattr(call, which)[0, 1, 5, 7] = float("inf")
    out, _ = run(call, RECIPES[name])
    assert out[:, 0].isfinite().all()
    assert not out[:, 1].isfinite().all()


# case 23
@pytest.mark.parametrize("dtypes", [pytest.param("ffh", marks=slow), "hfb"])
@recipes
def test_mixed_types_give_the_type_of_v(name, dtypes):
    of = {"f": torch.float32, "h": torch.float16, "b": torch.bfloat16}
    call = make((1, 2, 2, 66, 130, 64))
    q, k, v = (t.to(of[d]) for t, d in zip((call.q, call.k, call.v), dtypes, strict=True))
    assert check(replace(call, q=q, k=k, v=v), RECIPES[name]).dtype == v.dtype


# case 11: every key head holds a constant of its own
@pytest.mark.parametrize(
    "kv_heads", [pytest.param(heads, marks=() if heads == 2 else slow) for heads in (8, 4, 2, 1)]
)
@recipes
def test_query_heads_share_key_heads_in_blocks(name, kv_heads):
    call = make((1, 8, kv_heads, 40, 50, 64))
    heads = torch.arange(1, kv_heads + 1, device=DEVICE, dtype=torch.float16).view(1, -1, 1, 1)
    out, _ = run(replace(call, v=heads.expand_as(call.v)), RECIPES[name])
    expected = heads.repeat_interleave(8 // kv_heads, 1).expand_as(out)
    # Codes of P weigh up to 2.2 % less than their sum (INT8); heads are 12 % apart.
    torch.testing.assert_close(out, expected, rtol=0.03, atol=0)


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


LENGTHS = [([0, 1, 0, 130], [0, 3, 0, 77]), ([64, 70], [200, 5]), ([30, 40], [0, 77])]


# case 16
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [pytest.param(None, marks=slow), 3])
@recipes
def test_packed_members_equal_their_own_calls(name, lengths, causal):
    q_lens, k_lens = lengths
    call = make(
        (1, 4, 2, sum(q_lens), sum(k_lens), 64),
        causal_offset=causal,
        cu_seqlens_q=offsets(q_lens),
        cu_seqlens_kv=offsets(k_lens),
        return_lse=True,
    )
    out, lse = run(call, RECIPES[name])
    q_at = k_at = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        rows, keys = slice(q_at, q_at + q_len), slice(k_at, k_at + k_len)
        q_at, k_at = rows.stop, keys.stop
        if q_len == 0:
            continue
        if k_len == 0:
            assert not out[:, :, rows].any()
            assert (lse[:, :, rows] == -torch.inf).all()
            continue
        member = replace(
            call,
            q=call.q[:, :, rows],
            k=call.k[:, :, keys],
            v=call.v[:, :, keys],
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
        )
        own, own_lse = run(member, RECIPES[name])
        torch.testing.assert_close(out[:, :, rows], own, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(lse[:, :, rows], own_lse, rtol=1e-4, atol=1e-3)


# case 17: one mean a member
@recipes
def test_packed_members_have_their_own_mean(name):
    call = make((1, 2, 2, 256, 256, 64))
    far = 40 * torch.randn(64, generator=torch.Generator().manual_seed(5)).to(call.k)
    k = torch.cat([call.k[:, :, :128] + far, call.k[:, :, 128:] - far], 2)
    at = offsets([128, 128])
    call = replace(call, k=k, cu_seqlens_q=at, cu_seqlens_kv=at)
    out, _ = run(call, RECIPES[name])
    least = 0.998 if RECIPES[name].qk_bits == 8 else 0.97
    assert compare(out.float(), exact(call)[0]).worst.cosine > least


@recipes
def test_a_nan_stays_in_its_member(name):
    call = make((1, 2, 2, 100, 100, 64))
    for t in (call.k, call.v):
        t[:, :, 50:] = float("nan")
    at = offsets([50, 50])
    out, _ = run(replace(call, cu_seqlens_q=at, cu_seqlens_kv=at), RECIPES[name])
    assert out[:, :, :50].isfinite().all()
    assert out[:, :, 50:].isnan().all()


# case 18: a row that sees nothing, by a bool mask, by -inf, and by the lowest number
@recipes
def test_rows_with_every_key_masked(name):
    call = make((1, 2, 2, 4, 80, 64))
    keep = torch.ones(4, 80, dtype=torch.bool, device=DEVICE)
    keep[1] = False
    for low in (None, -torch.inf, torch.finfo(torch.float32).min):
        mask = keep if low is None else torch.zeros(4, 80, device=DEVICE).masked_fill(~keep, low)
        out, lse = run(replace(call, attn_mask=mask, return_lse=True), RECIPES[name])
        if low is None or low == -torch.inf:
            assert not out[:, :, 1].any()
            assert (lse[:, :, 1] == -torch.inf).all()
        else:
            mean = call.v.float().mean(2)
            torch.testing.assert_close(out[:, :, 1].float(), mean, rtol=0.05, atol=0.05)


# Keys that no query sees are padding in any mask; the mask is one row for all, by a stride of 0.
@recipes
def test_keys_that_no_query_sees_hold_any_bytes(name):
    keep = torch.rand(1, 1, 70, 200, generator=torch.Generator().manual_seed(3)) < 0.7
    keep[..., 60:160] = False
    call = make((1, 2, 2, 70, 200, 64), attn_mask=keep.to(DEVICE).expand(1, 2, 70, 200))
    k, v = call.k.clone(), call.v.clone()
    k[:, :, 60:160], v[:, :, 60:160] = float("nan"), float("nan")
    out, _ = run(call, RECIPES[name])
    dirty, _ = run(replace(call, k=k, v=v), RECIPES[name])
    assert torch.equal(out, dirty)


# case 28. INT4's means of Q by keys take 4 bytes a key and block of queries: 1.2 GB a head at 200k.
@slow
@pytest.mark.skipif(not ON_GPU, reason="200,000 tokens")
@pytest.mark.parametrize("name", ["sage1_b", "sage1_b_f32", "sage2_8", "sage2pp_8", "sage2_4"])
def test_error_does_not_grow_with_length(name):
    error_does_not_grow_with_length(run, RECIPES[name], DEVICE)


# Once wrong: such a row gave 0.
def test_a_row_of_fp64_s_lowest_number_stays_the_mean_of_v():
    call = make((1, 2, 2, 20, 40, 64))
    mask = torch.zeros(20, 40, dtype=torch.float64)
    mask[3] = torch.finfo(torch.float64).min
    call = replace(call, attn_mask=mask.to(DEVICE))
    out, _ = run(call, RECIPES["sage2_8"])
    assert torch.allclose(out[:, :, 3].float(), call.v.float().mean(2), atol=0.03)
