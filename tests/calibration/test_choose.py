"""Choosing a layer's kernel: pure, monotone in the threshold, fastest among the accurate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.layers import errors, sample, summary

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.choose import (
    LEAST_GAIN,
    Summary,
    check_bound,
    choose,
    error_bound,
    refusal,
)
from sagepatch.calibration.sample import Sample
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import TIERS

FAST, FAST2, SAFE = "emulated.sage2_8", "emulated.sage2pp_8", "emulated.sage1_b"


def chosen(*rows: Summary, samples=4, threshold=0.998, us_exact: float | None = None):
    table = {row.variant: row for row in rows}
    return choose(table, samples=samples, threshold=threshold, us_exact=us_exact)


def test_the_bound_that_a_cosine_allows() -> None:
    assert error_bound(0.998) == pytest.approx(0.0632, abs=1e-4)
    assert error_bound(1.5) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finite": False}, "not finite"),
        ({"cosine": 0.9979}, "head 1, call 4"),
        ({"cosine": -1.0}, "cosine -1"),
        ({"rel_l1": 0.0633}, "relative L1 0.0633 > 0.0632"),
        ({"norm_ratio": 0.93}, "norm ratio 0.9300"),
        ({"norm_ratio": 1.07}, "norm ratio 1.0700"),
        ({"norm_ratio": math.inf}, "norm ratio inf"),
        ({"rel_l1": math.nan}, "relative L1 nan"),
    ],
    ids=str,
)
def test_each_bound_refuses_alone(changes, said: str) -> None:
    assert refusal(summary(FAST), 0.998) is None
    reason = refusal(summary(FAST, **changes), 0.998)
    assert reason is not None
    assert said in reason
    assert chosen(summary(FAST, **changes)).variant == SDPA.name


def test_threshold_zero_asks_for_finiteness_alone() -> None:
    poor = summary(FAST, 0.1, rel_l1=math.inf, norm_ratio=math.inf)
    assert chosen(poor, threshold=0).variant == FAST
    assert chosen(replace(poor, finite=False), threshold=0).variant == SDPA.name


def test_a_threshold_above_one_admits_nothing() -> None:
    perfect = summary(FAST, 1.0, rel_l1=0.0, norm_ratio=1.0, us=1.0)
    assert chosen(perfect, threshold=1.01, us_exact=9.0).variant == SDPA.name


@pytest.mark.parametrize("samples", [0, 1])
def test_nothing_is_chosen_on_one_sample(samples: int) -> None:
    choice = chosen(summary(FAST, samples=samples), samples=samples)
    assert choice.variant == SDPA.name
    assert f"only {samples} of 2 samples" in choice.reason


def test_untimed_candidates_rank_by_tier_then_catalogue() -> None:
    for order in ((SAFE, FAST, FAST2), (FAST2, SAFE, FAST)):
        choice = chosen(*(summary(name) for name in order))
        first = min((FAST, FAST2), key=list(BY_NAME).index)
        assert choice.variant == first
        assert choice.alternatives[-1] == SAFE
        assert "nothing timed" in choice.reason


def test_the_fastest_measured_wins_whatever_its_tier() -> None:
    choice = chosen(summary(FAST, us=80.0), summary(SAFE, us=70.0), us_exact=100.0)
    assert choice.variant == SAFE
    assert choice.alternatives == (FAST,)
    assert "1.43x exact" in choice.reason


# case 67
def test_exact_wins_where_quantising_is_slower() -> None:
    choice = chosen(summary(FAST, us=120.0), summary(SAFE, us=100.0), us_exact=100.0)
    assert choice.variant == SDPA.name
    assert choice.reason == f"exact is fastest: 100 us, {SAFE} takes 100 us"
    assert set(choice.alternatives) == {FAST, SAFE}


def test_a_fast_but_wrong_kernel_is_passed_over_with_its_reason() -> None:
    choice = chosen(summary(FAST, 0.99, us=10.0), summary(SAFE, us=70.0), us_exact=100.0)
    assert choice.variant == SAFE
    assert f"{FAST} refused: cosine 0.99000 < 0.998" in choice.reason


def test_untimed_candidates_lose_where_exact_was_timed() -> None:
    choice = chosen(summary(FAST), us_exact=100.0)
    assert choice.variant == SDPA.name
    assert "none was timed" in choice.reason


# case 31
def test_a_candidate_is_as_good_as_its_worst_sample() -> None:
    def row(call: int, cosine: float, **changes) -> Sample:
        found = {"us": 10.0 * call, **changes}
        heads = replace(errors((1.0, 1.0, 1.0, cosine)), **{"rel_l1": (0.02,), **found})
        return replace(sample(call, {}, (call - 1, 8)), errors={FAST: heads})

    rows = [
        row(1, 0.9999),
        row(2, 0.9971, rel_l1=(0.01, 0.05)),
        row(4, 0.9999, norm_ratio=(1.01, 0.97)),
    ]
    total = Summary.of(FAST, rows)
    assert (total.cosine, total.worst_call, total.worst_head) == (0.9971, 2, 3)
    assert (total.rel_l1, total.norm_ratio, total.us) == (0.05, 0.97, 20.0)
    assert total.cosine_mean == pytest.approx(0.99897, abs=1e-4)
    assert not Summary.of(FAST, [*rows, row(8, 1.0, finite=False)]).finite
    assert refusal(total, 0.998) == "cosine 0.99710 < 0.998 (head 3, call 2 (step 2 of 8))"


CANDIDATES = st.builds(
    summary,
    st.sampled_from([n for n, v in BY_NAME.items() if v is not SDPA]),
    st.floats(-1, 1),
    st.floats(1, 1000),
    rel_l1=st.floats(0, 2),
    norm_ratio=st.floats(0, 2),
    finite=st.booleans(),
)


# case 60
@settings(max_examples=200, deadline=None)
@given(st.lists(CANDIDATES, max_size=6), st.booleans(), st.floats(-0.5, 1.5), st.floats(-0.5, 1.5))
def test_a_higher_threshold_never_admits_more_nor_gains_speed(rows, timed, a, b) -> None:
    low, high = sorted((a, b))
    table = {row.variant: row if timed else replace(row, us=None) for row in rows}
    us_exact = 500.0 if timed else None
    before = choose(table, samples=4, threshold=low, us_exact=us_exact)
    after = choose(table, samples=4, threshold=high, us_exact=us_exact)
    admitted = {*after.alternatives, after.variant} - {SDPA.name}
    assert admitted <= {*before.alternatives, before.variant}

    def cost(name: str) -> float:
        if timed:
            return us_exact if name == SDPA.name else table[name].us
        return TIERS.index(BY_NAME[name].tier)

    assert cost(before.variant) <= cost(after.variant)
    assert choose(table, samples=4, threshold=low, us_exact=us_exact) == before


@pytest.mark.parametrize("us_exact", [40.0, 10000.0])
def test_a_kernel_must_win_by_more_than_times_scatter(us_exact: float) -> None:
    us = us_exact - LEAST_GAIN * us_exact
    assert chosen(summary(FAST, us=us), us_exact=us_exact).variant == FAST
    choice = chosen(summary(FAST, us=us + 1), us_exact=us_exact)
    assert choice.variant == SDPA.name
    assert choice.reason == f"too little is gained: {us_exact:.0f} us, {FAST} takes {us + 1:.0f} us"
    # Another GPU may find that it pays there.
    assert choice.alternatives == (FAST,)


@pytest.mark.parametrize("value", [True, False, "0.9", None, math.nan])
def test_a_bound_is_a_number(value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"budget is {value!r}, needs a number"):
        check_bound("budget", value)


# On an H200 exact attention of SDXL's 1,024 tokens took 34 us, and a quantised kernel 45 (its host
# 33); its host took 65 once, in whatever time the GPU was done.
def test_what_the_host_takes_longer_for_than_the_gpu_decides_and_is_said() -> None:
    def row(call: int, us: float, host_us: float) -> Sample:
        timed = replace(errors(0.9999), us=max(us, host_us), host_us=host_us)
        return replace(sample(call, {}), errors={FAST: timed})

    rows = [row(1, 20.0, 65.0), row(2, 20.0, 65.0)]
    choice = chosen(Summary.of(FAST, rows), us_exact=34.0)
    assert choice.variant == SDPA.name
    assert choice.reason == f"exact is fastest: 34 us, {FAST} takes 65 us of the host"
    rows = [row(1, 45.0, 33.0), row(2, 45.0, 33.0)]
    assert chosen(Summary.of(FAST, rows), us_exact=34.0).reason.endswith("takes 45 us")
    assert chosen(Summary.of(FAST, rows), us_exact=60.0).variant == FAST
