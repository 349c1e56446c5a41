"""The bench: checks before it times, exact attention beside every kernel, spread reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagepatch import bench
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.numerics.recipe import SAGE1_B

CPU = torch.device("cpu")
SHAPE = bench.Shape("tiny", 1, 4, 2, 77, 40, causal=True)


def test_rows_without_a_clock_hold_errors_and_no_times() -> None:
    rows = list(bench.bench([SHAPE], CPU, torch.float32, ["sage1_b", "sage2_8"]))
    assert [row.variant for row in rows] == ["sdpa.exact", "emulated.sage2_8", "emulated.sage1_b"]
    assert rows[0].cosine == 1.0
    assert all(row.ms_median is None and row.fault is None for row in rows)
    assert all(0.99 < row.cosine < 1 for row in rows[1:])


def test_times_are_medians_beside_exact_attention() -> None:
    seen = iter([[4.0, 2.0, 3.0, 1.0, 90.0], [1.0, 1.5, 2.0, 0.5, 1.5]])
    ran = []

    def clock(run):  # type: ignore[no-untyped-def]
        ran.append(run())
        return next(seen)

    exact, ours = bench.bench([SHAPE], CPU, torch.float32, ["sage1_b"], timer=clock)
    assert (exact.ms_median, ours.ms_median) == (3.0, 1.5)
    assert (exact.speedup, ours.speedup) == (1.0, 2.0)
    assert exact.ms_p20 is not None
    assert exact.ms_p20 < 3.0 < 90.0
    # 4 B H S^2 D, half of it where causal.
    assert ours.tflops == pytest.approx(4 * 4 * 77**2 * 40 / 2 / 1.5e-3 / 1e12)
    assert len(ran) == 2


def test_a_kernel_off_its_emulator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(BY_NAME["emulated.sage1_b"], toolchain="triton")

    def zeros(call, recipe):  # type: ignore[no-untyped-def]
        return call.empty_out().zero_(), None

    real = bench.load
    monkeypatch.setattr(bench, "CATALOGUE", (broken,))
    monkeypatch.setattr(
        bench, "load", lambda entry: zeros if entry == broken.entry else real(entry)
    )
    rows = list(
        bench.bench([SHAPE], CPU, torch.float32, [SAGE1_B.name], timer=lambda run: [1.0, 1.0])
    )
    assert rows[1].ms_median is None
    assert rows[1].fault is not None
    assert "off its emulator" in rows[1].fault


def test_the_checked_shape_keeps_what_matters() -> None:
    small = bench.SHAPES["llama_8k_causal"].reduced()
    assert (small.length, small.head_dim, small.causal) == (bench.CHECKED_LENGTH, 128, True)
    assert bench.Shape("g", 2, 32, 8, 4096, 64).reduced().q_heads == 8
