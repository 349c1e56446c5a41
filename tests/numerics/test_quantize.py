"""Quantisers against brute force, group by group."""

from __future__ import annotations

import math

import pytest
import torch

from sagepatch.numerics import quantize
from sagepatch.numerics.recipe import FP16_MAX


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _brute(x: torch.Tensor, groups: torch.Tensor, largest: int) -> tuple[list, list]:
    """Codes and scales of x [S, D] by the words of the specification, in Python floats."""
    codes, scales = [], []
    for row in range(x.shape[0]):
        members = x[groups == groups[row]]
        amax = torch.tensor(members.abs().max().item(), dtype=torch.float32)
        inverse = torch.tensor(float(largest)) / amax if amax > 0 else torch.tensor(0.0)
        codes.append([round((value * inverse).item()) for value in x[row]])
        scales.append((amax / largest).item())
    return codes, scales


@pytest.mark.parametrize("largest", [127, 7], ids=["int8", "int4"])
@pytest.mark.parametrize("granularity", ["tensor", "block", "thread", "token"])
@pytest.mark.parametrize("side", ["query", "key"])
def test_codes_and_scales_equal_brute_force(side: str, granularity: str, largest: int) -> None:
    x = _noise(131, 5)
    grouping = quantize.query_groups if side == "query" else quantize.key_groups
    groups = grouping(131, granularity, 64, x.device)
    got = quantize.to_integer(x, groups, largest)
    codes, scales = _brute(x, groups, largest)
    assert got.codes.tolist() == codes
    assert got.scale.flatten().tolist() == scales
    assert got.codes.abs().max() <= largest


def test_thread_groups_are_those_of_the_mma_fragment() -> None:
    queries = quantize.query_groups(70, "thread", 128, torch.device("cpu"))
    for row in range(70):
        same = [r for r in range(70) if r // 32 == row // 32 and r % 8 == row % 8]
        assert (queries == queries[row]).nonzero().flatten().tolist() == same
    keys = quantize.key_groups(130, "thread", 64, torch.device("cpu"))
    for key in range(130):
        same = [k for k in range(130) if k // 64 == key // 64 and k % 8 // 2 == key % 8 // 2]
        assert (keys == keys[key]).nonzero().flatten().tolist() == same
    assert int(keys[:64].max()) == 3  # four groups in 64 keys


def test_halves_round_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    codes = quantize.to_integer(x, torch.zeros(1, dtype=torch.int64), 127).codes
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]


# case 25
def test_groups_of_zeros_give_zero_codes_and_scales() -> None:
    x = torch.zeros(4, 3)
    x[2] = 1.0
    got = quantize.to_integer(x, torch.arange(4), 127)
    assert got.scale.flatten().tolist() == [0, 0, pytest.approx(1 / 127), 0]
    assert got.codes[0].tolist() == [0, 0, 0]
    for quantised in (
        quantize.to_integer_per_channel(torch.zeros(1, 1, 5, 2), 127),
        quantize.to_float8_per_channel(torch.zeros(1, 1, 5, 2), 448.0, torch.float8_e4m3fn),
        quantize.to_float16_per_channel(torch.zeros(1, 1, 5, 2), 1023.0),
    ):
        assert torch.equal(quantised.codes * quantised.scale, torch.zeros(1, 1, 5, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = _noise(1, 1, 6, 4)
    x[0, 0, 2, 1] = bad
    for quantised in (
        quantize.to_integer(x, torch.zeros(6, dtype=torch.int64), 127),
        quantize.to_integer_per_channel(x, 127),
        quantize.to_float8_per_channel(x, 448.0, torch.float8_e4m3fn),
        quantize.to_float16_per_channel(x, 1023.0),
    ):
        assert not (quantised.codes * quantised.scale)[0, 0, 2, 1].isfinite()
    for quantised in (
        quantize.to_integer(x, torch.zeros(6, dtype=torch.int64), 127),
        quantize.to_float8_per_channel(x, 448.0, torch.float8_e4m3fn),
    ):
        assert quantised.scale.isnan().any()  # whatever a kernel makes of the codes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_float8_fills_its_range_and_errs_by_half_a_step(dtype: torch.dtype) -> None:
    x = _noise(2, 3, 50, 7) * torch.logspace(-3, 3, 7)
    top = torch.finfo(dtype).max
    got = quantize.to_float8_per_channel(x, top, dtype)
    assert torch.equal(got.codes.abs().amax(2), torch.full((2, 3, 7), top))
    relative = ((got.codes * got.scale - x).abs() / x.abs()).median()
    assert relative < torch.finfo(dtype).eps / 2


# case 26
def test_fp16_scales_down_only_channels_that_need_it_and_by_powers_of_two() -> None:
    x = torch.ones(1, 1, 3, 5) * torch.tensor([1.0, 1023.0, 1024.0, 1e30, 2 * 1023.5])
    got = quantize.to_float16_per_channel(x, 1023.5)
    scale = got.scale.flatten().tolist()
    assert scale[:3] == [1.0, 1.0, 2.0]
    assert math.log2(scale[3]).is_integer()
    assert scale[4] == 2.0  # exactly twice the range: 2 is enough
    assert got.codes.abs().max() <= 1023.5 < FP16_MAX
    torch.testing.assert_close(got.codes * got.scale, x, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_float8_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    """Every code, every middle between two codes and its neighbours, and any bits at all."""
    top = torch.finfo(dtype).max
    grid = torch.arange(256).to(torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()].sort().values
    middle = ((grid[1:].double() + grid[:-1].double()) / 2).float()
    inf = torch.tensor(math.inf)
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=g).int().view(torch.float32)
    small = 2 * top * torch.rand(100_000, generator=g) - top
    x = torch.cat([grid, middle, middle.nextafter(inf), middle.nextafter(-inf), bits, small])
    want = x.clamp(-top, top).to(dtype).float()
    got = quantize.round_to(x, dtype)
    same = (got == want) | (got.isnan() & want.isnan())
    assert same.all()


@pytest.mark.parametrize("granularity", ["tensor", "block", "thread", "token"])
def test_float8_groups_fill_the_format(granularity: str) -> None:
    x = _noise(2, 131, 5) * torch.logspace(-2, 2, 131)[:, None]
    groups = quantize.key_groups(131, granularity, 64, x.device)
    codes, scale = quantize.to_float8(x, groups, 448.0, torch.float8_e4m3fn)
    for group in groups.unique():
        rows = groups == group
        assert torch.equal(codes[:, rows].abs().amax((1, 2)), torch.full((2,), 448.0))
        amax = x[:, rows].abs().amax((1, 2))
        assert torch.equal(scale[:, rows, 0], (amax / 448).unsqueeze(1).expand(2, int(rows.sum())))
    assert torch.equal(codes, codes.to(torch.float8_e4m3fn).float())


def test_one_bad_number_spoils_its_group_and_no_other() -> None:
    x = _noise(1, 128, 3)
    clean = quantize.to_integer(x, quantize.key_groups(128, "thread", 64, x.device), 127)
    x[0, 70, 1] = math.nan
    groups = quantize.key_groups(128, "thread", 64, x.device)
    got = quantize.to_integer(x, groups, 127)
    spoiled = groups == groups[70]
    assert got.scale[0, spoiled].isnan().all()
    assert torch.equal(got.scale[0, ~spoiled], clean.scale[0, ~spoiled])
    assert torch.equal(got.codes[0, ~spoiled], clean.codes[0, ~spoiled])


@pytest.mark.parametrize("value", [1e-36, 1e-40, 1e-45])
def test_what_has_no_inverse_counts_as_zero(value: float) -> None:
    x = torch.full((1, 4, 2), value)
    for codes, scale in (
        quantize.to_integer(x, torch.zeros(4, dtype=torch.int64), 127),
        quantize.to_float8_per_channel(x, 448.0, torch.float8_e4m3fn),
    ):
        assert not codes.any()
        assert not scale.any()


def test_multiplying_by_the_inverse_is_not_dividing_by_the_scale() -> None:
    """On BF16 numbers, whose ties are many, the two forms differ here and there."""
    x = _noise(4000, 64).bfloat16().float()
    codes, scale = quantize.to_integer(x, torch.arange(4000), 127)
    differ = (codes != torch.round(x / scale)).float().mean().item()
    assert 0 < differ < 0.002


def test_groups_of_nothing() -> None:
    empty = torch.zeros(2, 0, 5)
    got = quantize.to_integer(empty, torch.zeros(0, dtype=torch.int64), 127)
    assert got.codes.shape == (2, 0, 5)
    assert quantize.to_integer_per_channel(empty, 127).scale.shape == (2, 1, 5)
    assert quantize.to_integer(torch.zeros(3, 0), torch.arange(3), 127).scale.shape == (3, 1)
