"""Hard numbers on the Triton kernels: zero groups, the FP16 range, NaN, huge logits, offsets, and
the guard's predicated fallback.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_contract import equal_values_come_out_as_they_are, zero_channels_come_out_zero
from triton_support import DEVICE, DTYPE, ON_GPU, check, make, needs_kernels, tensors

pytestmark = needs_kernels

from sagepatch.backends.catalogue import TRITON  # noqa: E402
from sagepatch.backends.triton import attention  # noqa: E402
from sagepatch.numerics.attention import exact  # noqa: E402
from sagepatch.numerics.metrics import compare  # noqa: E402
from sagepatch.numerics.recipe import RECIPES  # noqa: E402
from sagepatch.spec import Call  # noqa: E402

ALL = [variant.recipe for variant in TRITON]
SAMPLE = [RECIPES[n] for n in ("sage2_8", "sage1_b", "sage1_vt", "sage2pp_8")]
recipes = pytest.mark.parametrize("recipe", ALL if ON_GPU else SAMPLE, ids=lambda r: r.name)


# case 25: a channel of zeros, a channel almost zero, everything zero
@recipes
def test_zero_channels_come_out_zero(recipe):
    zero_channels_come_out_zero(attention.run, make((1, 2, 2, 66, 100, 64)), recipe)


# case 26: V beyond FP16
@recipes
def test_values_beyond_the_fp16_range_stay_finite(recipe):
    q, k, v = tensors(1, 2, 2, 66, 130, 64)
    top = 1e5 if ON_GPU else 6e3
    call = Call(q, k, (v.float() * top).to(DTYPE), 0.125)
    check(call, recipe)
    equal_values_come_out_as_they_are(attention.run, call, recipe)


# case 29: keys with a common offset
@pytest.mark.parametrize("c", [4, 16, 64])
def test_common_offset_of_keys_is_smoothed_away(c):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 128, 64, generator=gen) for _ in range(3))
    k = k + c * torch.randn(64, generator=gen)
    call = Call(*(t.to(DEVICE, torch.float16) for t in (q, k, v)), 0.125)
    reference = exact(call)[0]
    for name, least in (("sage2_8", 0.998), ("sage1_b", 0.999), ("sage2_4", 0.98)):
        out, _ = attention.run(call, RECIPES[name])
        assert compare(out.float(), reference).worst.cosine >= least, name


# case 30: finite but very large logits
@recipes
def test_huge_logits_stay_finite(recipe):
    q, k, v = tensors(1, 2, 2, 66, 130, 64)
    out, _ = attention.run(Call(q * 300, k * 300, v, 1.0), recipe)
    assert bool(out.isfinite().all())
    big = torch.full_like(q, 1e4)
    out, _ = attention.run(Call(big, torch.full_like(k, 1e4), v, 1.0), recipe)
    assert bool(out.isfinite().all())
    lowest = torch.full((66, 130), torch.finfo(torch.float32).min, device=DEVICE)
    out, _ = attention.run(Call(-big, torch.full_like(k, 1e4), v, 1.0, attn_mask=lowest), recipe)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@recipes
def test_non_finite_inputs_reach_the_output(recipe, bad):
    for name in ("q", "k", "v"):
        call = make((1, 2, 2, 66, 130, 64))
        tensor = getattr(call, name).clone()
        tensor[0, 1, 5, 7] = bad
        out, _ = attention.run(replace(call, **{name: tensor}), recipe)
        assert bool(out[:, 0].isfinite().all())
        assert not bool(out[:, 1].isfinite().all()), name


def _guard_call(**options):
    return make((1, 2, 1, 70, 130, 64), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal_offset": 3, "window": 40}, {"softcap": 4.0, "return_lse": True}],
    ids=["plain", "window", "softcap"],
)
def test_guard_overwrites_with_exact_attention_where_the_flag_is_up(options):
    call = _guard_call(**options)
    flags = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out, _ = attention.run_guarded(call, RECIPES["sage2_8"], flags)
    assert flags.tolist() == [0, 0]
    plain, _ = attention.run(call, RECIPES["sage2_8"])
    assert torch.equal(out, plain)
    flags[0] = 1
    out, lse = attention.run_guarded(call, RECIPES["sage2_8"], flags)
    reference, reference_lse = exact(call)
    assert compare(out.float(), reference).worst.rel_l1 < 5e-3
    if lse is not None:
        torch.testing.assert_close(lse, reference_lse, rtol=1e-4, atol=1e-4)
    assert flags.tolist() == [1, 0]


def test_guard_tells_bad_inputs_from_bad_kernels():
    call = _guard_call()
    v = call.v.clone()
    v[0, 0, 3, 3] = float("nan")
    flags = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    attention.run_guarded(replace(call, v=v), RECIPES["sage2_8"], flags)
    assert flags.tolist() == [1, 1]


def test_guard_blames_the_inputs_for_an_infinity_in_the_mask():
    mask = torch.zeros(70, 130, device=DEVICE, dtype=DTYPE)
    mask[5, 100] = float("inf")
    call = _guard_call(attn_mask=mask)
    flags = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out, _ = attention.run_guarded(call, RECIPES["sage2_8"], flags)
    wanted, _ = exact(call)
    assert bool(wanted[:, :, 5].isnan().all())
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=5e-3, equal_nan=True)
    assert flags.tolist() == [1, 1]


@pytest.mark.parametrize("dtypes", ["fff", "ffh", "hfh"])
def test_mixed_dtypes_give_the_dtype_of_v(dtypes):
    # case 23
    of = {"f": torch.float32, "h": torch.float16}
    q, k, v = (t.to(of[d]) for t, d in zip(tensors(1, 2, 2, 66, 130, 64), dtypes, strict=True))
    out, _ = check(Call(q, k, v, 0.125), RECIPES["sage2_8"])
    assert out.dtype == v.dtype
