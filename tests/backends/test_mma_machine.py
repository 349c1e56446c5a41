"""What the mma.sync kernels make of a machine and of a mask, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from sagepatch.backends.cuda_mma import machine
from sagepatch.backends.cuda_mma.masks import narrowed

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with a GB10 and an RTX 4090, and a compiler that does not know the GB10; the list
    holds the number of the current one.
    """
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    archs = (121, 89)
    monkeypatch.setattr(
        machine,
        "arch_of",
        lambda device: archs[current[0] if device.index is None else device.index],
    )
    monkeypatch.setattr(
        machine, "missing", lambda target: f"no {target}" if target == "sm_121a" else None
    )
    return current


# Once wrong: the current GPU spoke for the other one.
@pytest.mark.parametrize("current", [0, 1])
def test_a_gpu_that_the_compiler_does_not_know_says_nothing_against_another(
    two: list[int], current: int
) -> None:
    two[0] = current
    assert machine.missing_here() is None


def test_where_it_knows_none_of_them_the_first_reason_is_told(
    two: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "missing", lambda target: f"no {target}")
    two[0] = 1
    assert machine.missing_here() == "no sm_89"


# Once wrong: FP64's lowest number became -inf, and a row that it covers gave 0, not the mean of V.
def test_a_mask_in_fp64_hides_only_what_is_infinite() -> None:
    wide = torch.finfo(torch.float64)
    given = torch.tensor(
        [wide.min, -1e39, -1.5, 0.0, wide.max, -math.inf, math.inf, math.nan], dtype=torch.float64
    )
    found = narrowed(given)
    assert found.dtype == torch.float32
    assert found[:-1].tolist() == [LOWEST, LOWEST, -1.5, 0.0, -LOWEST, -math.inf, math.inf]
    assert found[-1].isnan()
