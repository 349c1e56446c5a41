"""Calibration on real numbers: the trained Q, K and V of the bundled pipeline, as it draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sagepatch
from sagepatch import Calibration
from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.choose import error_bound
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.numerics.recipe import TIERS
from sagepatch.report.pictures import Comparison

STEPS = 4
SITES = 11


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    loaded = load_pipeline()
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipeline: Any) -> Any:
    return pipeline(
        "a red apple",
        height=DEFAULTS.height,
        width=DEFAULTS.width,
        num_inference_steps=STEPS,
        max_sequence_length=DEFAULTS.max_sequence_length,
        guidance_scale=DEFAULTS.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(0),
    ).images[0]


@pytest.fixture(scope="module")
def exact_and_table(pipeline: Any) -> tuple[Any, Calibration]:
    drawn: list[Any] = []
    table = sagepatch.calibrate(pipeline, run=lambda: drawn.append(draw(pipeline)), emulate=True)
    return drawn[0], table


def test_calibrating_draws_the_exact_picture(
    pipeline: Any, exact_and_table: tuple[Any, Calibration]
) -> None:
    assert Comparison.of([exact_and_table[0]], [draw(pipeline)]).psnr_db > 80


def test_every_layer_is_measured_on_every_sampled_call(
    exact_and_table: tuple[Any, Calibration],
) -> None:
    layers = exact_and_table[1].layers
    assert len(layers) == SITES
    for layer in layers:
        # The first and the last of the four steps, and what their own time pays for between.
        steps = [row.step for row in layer.rows]
        assert steps[0] == 0
        assert steps[-1] == STEPS - 1
        assert steps == sorted(set(steps))
        assert layer.max_abs_v is not None
        assert layer.max_abs_v > 0
        for name, summary in layer.candidates.items():
            assert summary.samples == layer.samples
            assert summary.finite, name
            assert 0.99 < summary.cosine < 1, name


def test_real_layers_differ_and_the_threshold_tells_them_apart(
    exact_and_table: tuple[Any, Calibration],
) -> None:
    table = exact_and_table[1]
    worst = sorted(layer.candidates["emulated.sage2pp_8"].cosine for layer in table.layers)
    between = (worst[SITES // 2 - 1] + worst[SITES // 2]) / 2
    plan = table.plan(between)
    fast = [entry for entry in plan.entries if BY_NAME[entry.variant].tier == "fast"]
    assert 0 < len(fast) < SITES
    for entry in plan.entries:
        if entry.variant != SDPA.name:
            assert entry.cosine is not None
            assert entry.cosine >= between
            assert entry.rel_l1 is not None
            assert entry.rel_l1 <= error_bound(between)


def test_a_higher_threshold_never_admits_more(exact_and_table: tuple[Any, Calibration]) -> None:
    ranks = [0] * SITES
    for threshold in (0.0, 0.99, 0.998, 0.9995, 0.9999, 0.99999, 1.01):
        plan = exact_and_table[1].plan(threshold)
        now = [TIERS.index(BY_NAME[entry.variant].tier) for entry in plan.entries]
        assert all(a <= b for a, b in zip(ranks, now, strict=True))
        ranks = now
    assert ranks == [TIERS.index("exact")] * SITES


def test_the_locked_run_makes_no_exact_call_where_the_plan_is_not_exact(
    pipeline: Any, exact_and_table: tuple[Any, Calibration]
) -> None:
    exact, table = exact_and_table
    with sagepatch.apply(pipeline, plan=table.plan(), emulate=True) as patch:
        picture = draw(pipeline)
    quantised = [layer for layer in patch.layers if layer.request.variant != "exact"]
    assert len(quantised) == SITES
    for layer in quantised:
        assert layer.record.by_variant == {layer.request.variant: STEPS}
    comparison = Comparison.of([exact], [picture])
    assert 40 < comparison.psnr_db < 80
    assert not comparison.faults()
