"""Calibration with real kernels and real times: a plan is made, kept, followed, and never chooses
what was measured to be slower than exact attention.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.placed import EXACT, built, error, run
from models.stacks import stack, tokens
from torch import nn

import sagepatch
from sagepatch.calibration.capture import SAMPLED_CALLS
from sagepatch.calibration.choose import pays
from sagepatch.plan import Plan


@pytest.fixture(scope="module")
def long() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Attention that quantising pays for: 8192 tokens, 8 heads of 128."""
    model = stack(2, 1024).to("cuda", torch.bfloat16)
    for block in model:
        block.heads = 8
    return model, {"input": tokens(8192, 1024, 1).to("cuda", torch.bfloat16)}


def test_a_long_layer_is_quantised_and_its_plan_followed(
    long: tuple[nn.Module, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, inputs = long
    plain = run(model, inputs)
    calibration = sagepatch.calibrate(model, run=lambda: [run(model, inputs) for _ in range(2)])
    for row in calibration.layers:
        assert row.samples == 2
        assert row.timed
        assert len(row.candidates) >= 4
        assert row.us_exact is not None
        assert 50 < row.us_exact < 50_000
    plan = calibration.plan()
    for entry in plan.entries:
        assert entry.variant.startswith(("cuda.", "triton."))
        assert entry.us_chosen < entry.us_exact
        assert entry.cosine >= plan.threshold
    plan.save(tmp_path / "plan.json")
    with sagepatch.apply(model, plan=tmp_path / "plan.json") as patch:
        assert patch.locked
        assert 0 < error(run(model, inputs), plain) < 0.1
        for layer, entry in zip(patch.layers, plan.entries, strict=True):
            assert layer.record.by_variant == {entry.variant: 1}
        attention = patch.report().attention()
        assert attention is not None
        assert attention.gain > 1
    assert torch.equal(run(model, inputs), plain)
    assert Plan.load(tmp_path / "plan.json").entries == plan.entries


def test_a_layer_settles_by_itself_and_the_next_patch_starts_from_its_plan(
    long: tuple[nn.Module, dict[str, torch.Tensor]],
) -> None:
    model, inputs = long
    plain = run(model, inputs)
    with sagepatch.apply(model) as patch:
        for _ in range(SAMPLED_CALLS[-1]):
            assert torch.equal(run(model, inputs), plain)
        assert patch.locked
        chosen = [layer.runs for layer in patch.layers]
        assert 0 < error(run(model, inputs), plain) < 0.1
    with sagepatch.apply(model) as patch:
        run(model, inputs)
        assert patch.locked
        assert [layer.runs for layer in patch.layers] == chosen
        assert all("kept from an earlier run" in layer.reason for layer in patch.layers)


def test_a_short_layer_stays_exact_because_it_was_timed() -> None:
    model, inputs = built("stack")
    calibration = sagepatch.calibrate(model, run=lambda: [run(model, inputs) for _ in range(2)])
    for row, entry in zip(calibration.layers, calibration.plan().entries, strict=True):
        assert row.timed
        paying = any(pays(summary.us, row.us_exact) for summary in row.candidates.values())
        assert (entry.variant == EXACT) != paying
        assert entry.us_chosen <= entry.us_exact
