"""Metrics against their formulas, and at the edges where formulas divide by zero."""

from __future__ import annotations

import math

import pytest
import torch

from sagepatch.numerics.metrics import compare


def test_against_formulas() -> None:
    g = torch.Generator().manual_seed(0)
    r, noise = torch.randn(2, 2, 3, 5, 7, generator=g).unbind(0)
    o = 1.1 * r + 0.02 * noise
    whole = compare(o, r).whole
    o64, r64 = o.double().flatten(), r.double().flatten()
    assert whole.cosine == pytest.approx(torch.cosine_similarity(o64, r64, 0).item(), abs=1e-12)
    assert whole.rel_l1 == pytest.approx(((o64 - r64).abs().sum() / r64.abs().sum()).item())
    assert whole.rmse == pytest.approx((o64 - r64).pow(2).mean().sqrt().item())
    assert whole.max_abs == pytest.approx((o64 - r64).abs().max().item())
    assert whole.norm_ratio == pytest.approx((o64.norm() / r64.norm()).item())
    power = r64.pow(2).sum() / (o64 - r64).pow(2).sum()
    assert whole.sqnr_db == pytest.approx(10 * math.log10(power.item()))


def test_a_loud_head_does_not_hide_a_broken_one() -> None:
    r = torch.ones(1, 3, 4, 8)
    r[:, 0] *= 1000
    o = r.clone()
    o[:, 2] = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    comparison = compare(o, r)
    assert comparison.whole.cosine > 0.9999
    assert comparison.worst_head == 2
    assert comparison.worst.cosine < 0.5


def test_half_the_output_has_cosine_one_and_ratio_one_half() -> None:
    r = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(2))
    worst = compare(0.5 * r, r).worst
    assert worst.cosine == pytest.approx(1.0)
    assert worst.norm_ratio == pytest.approx(0.5)
    assert worst.rel_l1 == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_head_is_the_worst(bad: float) -> None:
    r = torch.ones(1, 3, 4, 8)
    o = r.clone()
    o[0, 1, 2, 3] = bad
    comparison = compare(o, r)
    assert comparison.worst_head == 1
    assert not comparison.worst.finite
    assert not comparison.whole.finite
    assert comparison.heads[0].finite


def test_zeros() -> None:
    zero, one = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    same = compare(zero, zero).whole
    assert (same.cosine, same.rel_l1, same.norm_ratio) == (1.0, 0.0, 1.0)
    assert compare(one, zero).whole.cosine == 0.0
    assert compare(zero, one).whole.norm_ratio == 0.0


def test_batches_and_tokens_of_a_head_count_together() -> None:
    g = torch.Generator().manual_seed(3)
    o, r = torch.randn(2, 3, 4, 5, 7, generator=g).unbind(0)
    heads = compare(o, r).heads
    assert len(heads) == 4
    for head, metrics in enumerate(heads):
        alone = compare(o[:, head : head + 1], r[:, head : head + 1]).whole
        assert metrics == alone


def test_the_worst_of_each_metric_may_be_another_head() -> None:
    r = torch.ones(1, 3, 2, 2)
    o = r.clone()
    o[0, 0] *= 1.5  # cosine 1, ratio 1.5
    o[0, 1, 0, 0] = -1.0  # lowest cosine
    o[0, 2] *= 0.6
    comparison = compare(o, r)
    assert comparison.worst_head == 1
    assert comparison.worst.cosine == comparison.heads[1].cosine
    assert comparison.worst.norm_ratio == pytest.approx(1.5)
    assert comparison.worst.max_abs == pytest.approx(2.0)
    assert comparison.worst.sqnr_db == min(head.sqnr_db for head in comparison.heads)


def test_low_precision_outputs_are_compared_in_double() -> None:
    r = 300.0 * torch.ones(1, 1, 4, 8)
    same = compare(r.half(), r).whole
    assert (same.cosine, same.rmse, same.sqnr_db) == (1.0, 0.0, math.inf)
    assert compare(r.bfloat16(), r).whole.finite  # 300 * 300 * 32 leaves FP16
    huge = compare(1e30 * r, 1e30 * r).whole
    assert (huge.finite, huge.cosine) == (True, 1.0)


def test_nothing_compares_as_equal() -> None:
    empty = torch.zeros(1, 2, 0, 4)
    assert compare(empty, empty).whole.cosine == 1.0
