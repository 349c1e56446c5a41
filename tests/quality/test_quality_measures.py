"""The arithmetic of the quality benchmarks: likeness, intervals, licences, baselines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.quality import baselines, corpus, intervals, layers, likeness, mistakes, sentences
from sagepatch.backends import load, selfcheck
from sagepatch.backends.catalogue import BY_NAME
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.metrics import compare
from sagepatch.report import pictures
from sagepatch.spec import Call


def test_psnr_and_ssim_are_those_of_the_report() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 256, (3, 3, 40, 32), generator=generator, dtype=torch.uint8)
    b = (a.int() + torch.randint(-9, 10, a.shape, generator=generator)).clamp(0, 255).byte()
    b[2] = a[2]
    frames = [[pictures.frame(x.permute(1, 2, 0)) for x in batch] for batch in (a, b)]
    for found, of in (
        (likeness.psnr_db(a, b), pictures.psnr_db),
        (likeness.ssim(a, b), pictures.ssim),
    ):
        wanted = [of(x, y) for x, y in zip(*frames, strict=True)]
        assert found.tolist() == pytest.approx(wanted, rel=1e-9)


def test_feature_distance_of_unrelated_features_is_the_root_of_two() -> None:
    a, b = torch.randn(2, 64, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert float(likeness.feature_distance(a, b, 1.0).mean()) == pytest.approx(2**0.5, rel=0.02)
    assert likeness.feature_distance(a, a, 1.0).max() == 0


def test_frechet_distance_of_known_distributions() -> None:
    chance = np.random.default_rng(0)
    a = chance.normal(size=(20000, 3))
    # Mean apart by 1, deviation 2 for 1 in one channel: 1 + (2 - 1)^2.
    b = chance.normal(size=(20000, 3)) * [2, 1, 1] + [0, 1, 0]
    assert intervals.frechet_distance(a, b) == pytest.approx(2, rel=0.05)
    assert intervals.frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert math.isnan(intervals.frechet_distance(a[:3], b[:3]))


def test_spread_leaves_equal_pictures_out() -> None:
    found = intervals.Spread.of([30.0, 34.0, math.inf], low_is_bad=True)
    assert (found.mean, found.n, found.worst) == (32.0, 2, 30.0)
    assert found.sd == pytest.approx(8**0.5)
    assert intervals.Spread.of([math.inf], low_is_bad=True).n == 0


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    chance = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        values = chance.normal(size=40)
        found = intervals.ratio_interval(values, np.ones(40), seed)
        hits += found.low < 0 < found.high
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize(
    ("licence", "is_open"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND MIT", True),
        ("Apache Software License", True),
        ("GPL-3.0-only OR MIT", True),
        ("MPL-2.0 AND MIT", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("", False),
    ],
)
def test_only_open_licences_are_taken(licence: str, is_open: bool) -> None:
    assert corpus.is_open(licence) is is_open


def call_of(offset: float = 0.0) -> Call:
    q, k, v = torch.randn(3, 1, 2, 200, 32, generator=torch.Generator().manual_seed(0)).unbind(0)
    return Call(q, k + offset, v, 32**-0.5, causal_offset=0)


@pytest.mark.parametrize("name", baselines.NAMES)
def test_a_baseline_is_worse_than_what_it_lacks(name: str) -> None:
    """Rough on plain data, and far from it, or no attention at all, where keys lie off zero."""
    variant = baselines.baseline(name, "emulated")
    plain, shifted = call_of(), call_of(offset=100.0)
    errors = []
    for call in (plain, shifted):
        out, _ = load(variant.entry)(call, variant.recipe)
        errors.append(compare(out, exact(call)[0]).whole.rel_l1)
    assert errors[0] < 0.4
    if "without Q" in name:
        # K is smoothed.
        assert errors[1] == pytest.approx(errors[0], rel=0.05)
    else:
        assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("mistake", mistakes.mistakes(), ids=lambda m: m.name)
def test_every_mistake_is_one(mistake: mistakes.Mistake) -> None:
    call = call_of()
    call = Call(2 * call.q, call.k, call.v + 1, call.scale)
    out, _ = load(mistake.variant.entry)(call, mistake.variant.recipe)
    found = compare(out, exact(call)[0]).whole
    if mistake.name == "offset keys, smoothed":
        assert found.rel_l1 < 0.01
    elif mistake.name == "FP16 overflow":
        assert not found.finite
    else:
        assert found.rel_l1 > 0.015


@pytest.mark.parametrize("mistake", mistakes.mistakes()[-4:], ids=lambda m: m.name)
def test_a_known_answer_check_refuses_a_kernel_that_makes_it(mistake: mistakes.Mistake) -> None:
    call = selfcheck.known_call(torch.device("cpu"))
    right, lse = emulate(call, mistake.variant.recipe)
    kernel = BY_NAME["triton.sage2_8"]
    assert selfcheck.verdict(kernel, call, right, lse) is None
    out, _ = load(mistake.variant.entry)(call, mistake.variant.recipe)
    assert selfcheck.verdict(kernel, call, out, lse) is not None


def test_ranks_count_ties_against_us() -> None:
    questions = torch.eye(3)
    answers = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
    assert sentences.ranks(questions, answers).tolist() == [1, 2, 3]


def test_statistics_of_keys() -> None:
    k = torch.randn(1, 2, 4096, 8, generator=torch.Generator().manual_seed(0))
    k[:, 1, :, 3] += 5
    assert layers.mean_over_spread(k) == pytest.approx(5, rel=0.05)
    assert 3.5 < layers.peak_over_spread(k) < 6
