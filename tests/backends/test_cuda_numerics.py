"""Hard numbers on the Hopper kernels: zero channels, the FP16 range, offsets of keys, huge scores,
infinities, members of a packed call, the length of a call.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc")

from cuda_support import DEVICE, check, every_recipe, make, needs_hopper
from kernel_contract import (
    equal_values_come_out_as_they_are,
    error_does_not_grow_with_length,
    zero_channels_come_out_zero,
)

from sagepatch.backends.cuda import attention, attention_tiles
from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import Call

pytestmark = needs_hopper
PACKS = [name for name in attention_tiles.SERVED if RECIPES[name].k_block <= 128]
every_packing = pytest.mark.parametrize("name", PACKS)


# case 25: a channel of zeros, everything zero
@every_recipe
def test_zero_channels_come_out_zero(recipe):
    zero_channels_come_out_zero(attention.run, make((1, 2, 2, 66, 100, 64)), recipe)


# case 26: V beyond FP16
@every_recipe
def test_values_beyond_the_fp16_range_stay_finite(recipe):
    call = make((1, 2, 2, 66, 130, 64))
    check(replace(call, v=call.v * 1e5), recipe)
    equal_values_come_out_as_they_are(attention.run, call, recipe)


# case 29: keys with a common offset
@pytest.mark.parametrize("c", [4, 16, 64])
@every_recipe
def test_common_offset_of_keys_is_smoothed_away(recipe, c):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 128, 64, generator=gen) for _ in range(3))
    k = k + c * torch.randn(64, generator=gen)
    call = Call(*(t.to(DEVICE, torch.float16) for t in (q, k, v)), 0.125)
    out, _ = attention.run(call, recipe)
    assert compare(out.float(), exact(call)[0]).worst.cosine >= 0.998


# case 30: finite but very large logits
@every_recipe
def test_huge_logits_stay_finite(recipe):
    call = make((1, 2, 2, 66, 130, 64))
    out, _ = attention.run(replace(call, q=call.q * 300, k=call.k * 300, scale=1.0), recipe)
    assert out.isfinite().all()
    big = replace(call, q=torch.full_like(call.q, 1e4), k=torch.full_like(call.k, 1e4), scale=1.0)
    out, _ = attention.run(big, recipe)
    assert out.isfinite().all()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@every_recipe
def test_infinities_reach_the_output(recipe, which):
    call = make((1, 2, 2, 66, 130, 64))
    getattr(call, which)[0, 1, 5, 7] = float("inf")
    out, _ = attention.run(call, recipe)
    assert out[:, 0].isfinite().all()
    assert not out[:, 1].isfinite().all()


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


LENGTHS = [([0, 1, 0, 130], [0, 3, 0, 77]), ([64, 70], [200, 5]), ([30, 40], [0, 77])]


# case 16
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [None, 3])
@every_packing
def test_packed_members_equal_their_own_calls(name, lengths, causal):
    q_lens, k_lens = lengths
    call = make(
        (1, 4, 2, sum(q_lens), sum(k_lens), 64),
        causal_offset=causal,
        cu_seqlens_q=offsets(q_lens),
        cu_seqlens_kv=offsets(k_lens),
        return_lse=True,
    )
    out, lse = attention.run(call, RECIPES[name])
    assert lse is not None
    q_at = k_at = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        rows, keys = slice(q_at, q_at + q_len), slice(k_at, k_at + k_len)
        q_at, k_at = rows.stop, keys.stop
        member = replace(
            call,
            q=call.q[:, :, rows],
            k=call.k[:, :, keys],
            v=call.v[:, :, keys],
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
        )
        own, own_lse = attention.run(member, RECIPES[name])
        torch.testing.assert_close(out[:, :, rows], own, rtol=0.02, atol=2e-3)
        torch.testing.assert_close(lse[:, :, rows], own_lse, rtol=1e-4, atol=1e-4)


# case 17: one mean a member
@every_packing
def test_packed_members_have_their_own_mean(name):
    call = make((1, 2, 2, 256, 256, 64))
    direction = torch.randn(64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    k = torch.cat([call.k[:, :, :128] + 40 * direction, call.k[:, :, 128:] - 40 * direction], 2)
    ends = offsets([128, 128])
    call = replace(call, k=k.to(call.k.dtype), cu_seqlens_q=ends, cu_seqlens_kv=ends)
    out, _ = attention.run(call, RECIPES[name])
    assert compare(out.float(), exact(call)[0]).worst.cosine > 0.998


@every_packing
def test_a_nan_stays_in_its_member(name):
    call = make((1, 2, 2, 100, 100, 64))
    for t in (call.k, call.v):
        t[:, :, 50:] = float("nan")
    ends = offsets([50, 50])
    out, _ = attention.run(replace(call, cu_seqlens_q=ends, cu_seqlens_kv=ends), RECIPES[name])
    assert out[:, :, :50].isfinite().all()
    assert out[:, :, 50:].isnan().all()


# case 28
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage2_8", "sage2pp_8_d4", "sage1_b_f32"])
def test_error_does_not_grow_with_length(name):
    error_does_not_grow_with_length(attention.run, RECIPES[name], DEVICE)
