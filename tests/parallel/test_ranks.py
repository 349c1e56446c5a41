"""The processes of these tests: one that fails, dies or hangs ends its test in time, and tells."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from parallel.ranks import on_ranks

pytestmark = pytest.mark.slow


def summed(rank: int) -> float:
    one = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(one)
    return float(one)


def failing(rank: int) -> None:
    if rank == 1:
        raise ValueError("a reason")
    torch.distributed.barrier()


def dying(rank: int) -> None:
    if rank == 1:
        os.write(2, b"last words")
        os._exit(7)
    torch.distributed.barrier()


def hanging(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def test_results_come_in_order(tmp_path: Path) -> None:
    assert on_ranks(2, summed, tmp_path) == [3.0, 3.0]


def test_a_failure_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2, exit code 1.*ValueError: a reason"):
        on_ranks(2, failing, tmp_path)


def test_a_death_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2, exit code 7:\nlast words"):
        on_ranks(2, dying, tmp_path)


def test_where_a_process_hangs_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Timeout.* in hanging"):
        on_ranks(2, hanging, tmp_path, longest_s=4)
