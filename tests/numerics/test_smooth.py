"""Means that only valid tokens enter, blocks that do not fill, a rotation that keeps products."""

from __future__ import annotations

import math

import pytest
import torch

from sagepatch.numerics import smooth


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_mean_is_over_valid_tokens_alone() -> None:
    x = noise(2, 3, 7, 4)
    valid = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    dirty = x.masked_fill(~valid[:, None, :, None], math.nan)
    got = smooth.masked_mean(dirty, valid)
    assert got.shape == (2, 3, 1, 4)
    torch.testing.assert_close(got[0, :, 0], x[0][:, valid[0]].mean(1))
    assert torch.equal(got[1], torch.zeros(3, 1, 4))  # nobody is valid
    assert smooth.masked_mean(x[:, :, :0], None).eq(0).all()


# case 29: the mean accumulated in fp32, at lengths where a half would lose it
def test_a_mean_of_many_large_numbers_is_accurate() -> None:
    x = (300.0 + noise(1, 1, 100_000, 2)).half()
    want = x.double().mean(2, keepdim=True)
    torch.testing.assert_close(
        smooth.masked_mean(x.float(), None).double(), want, rtol=1e-6, atol=0
    )
    valid = torch.ones(1, 100_000, dtype=torch.bool)
    torch.testing.assert_close(
        smooth.masked_mean(x.float(), valid).double(), want, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_the_last_block_of_a_mean_may_be_short(length: int) -> None:
    q = noise(2, 2, length, 3)
    got = smooth.block_mean(q, 32)
    assert got.shape == q.shape
    for first in range(0, length, 32):
        rows = slice(first, first + 32)
        want = q[:, :, rows].mean(2, keepdim=True).expand_as(q[:, :, rows])
        torch.testing.assert_close(got[:, :, rows], want)


@pytest.mark.parametrize("dim", [1, 2, 40, 64, 72, 128])
def test_rotation_keeps_products_and_spreads_a_spike(dim: int) -> None:
    q, k = noise(5, dim), noise(6, dim) + 1
    size = 1 << (dim - 1).bit_length()
    rotated = smooth.rotate(q)
    assert rotated.shape == (5, size)
    torch.testing.assert_close(rotated @ smooth.rotate(k).T, q @ k.T, atol=1e-4, rtol=1e-4)
    matrix = smooth.hadamard_rotation(dim, q.device)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-6, rtol=0)
    spike = torch.zeros(dim)
    spike[0] = 1.0
    assert smooth.rotate(spike).abs().max().item() == pytest.approx(size**-0.5)


def test_the_rotation_is_the_same_every_time_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = smooth.hadamard_rotation(64, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, smooth.hadamard_rotation(64, torch.device("cpu")))
    signs = first[:, 0] * 8
    assert 16 < int((signs > 0).sum()) < 48  # random signs, not the bare Hadamard matrix
