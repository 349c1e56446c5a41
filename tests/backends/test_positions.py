"""Causal offsets and windows of any size, as kernels take them: what is hidden stays hidden."""

from __future__ import annotations

import pytest
import torch

from sagepatch.backends.positions import plain_positions, positions
from sagepatch.spec import Call

Sq, Skv = 9, 14


def seen(offset, window):
    """Which keys each row sees."""
    return [
        [j <= i + offset and (window is None or j > i + offset - window) for j in range(Skv)]
        for i in range(Sq)
    ]


@pytest.mark.parametrize("window", [None, 1, 7, 2**31, 2**60])
@pytest.mark.parametrize("offset", [0, 3, -3, 40, 2**31 - 1, -(2**31), 2**60, -(2**60)])
def test_positions_in_32_bits_hide_and_show_the_same(offset, window):
    near, kept = positions(offset, window, Sq + Skv)
    assert abs(near) <= Sq + Skv
    assert 0 <= kept <= 2 * (Sq + Skv) + 1
    assert seen(near, None if window is None else kept) == seen(offset, window)


# Once wrong: Triton's integers have 32 bits up to 2^31, and an offset near there hid every key.
@pytest.mark.parametrize("window", [None, 1, 7, 2**29, 2**31 - 1, 2**31, 2**60, 2**63 - 1])
@pytest.mark.parametrize("offset", [0, 3, -3, 2**29, 2**31 - 1, -(2**31), 2**60, 2**63 - 1])
def test_numbers_that_would_overflow_are_moved_and_others_are_not(offset, window):
    q, k = torch.zeros(1, 1, Sq, 8), torch.zeros(1, 1, Skv, 8)
    found = plain_positions(Call(q, k, k, 1.0, causal_offset=offset, window=window))
    assert all(abs(number) < 2**29 for number in found)
    assert seen(found[0], None if window is None else found[1]) == seen(offset, window)
    if abs(offset) < 2**29 and (window or 0) < 2**29:
        assert found == (offset, window or 0)


def test_a_call_without_positions_has_none():
    q = torch.zeros(1, 1, Sq, 8)
    assert plain_positions(Call(q, q, q, 1.0)) == (0, 0)
