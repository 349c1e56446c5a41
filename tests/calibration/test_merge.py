"""Tables of several processes as one: every sample counts, and what cannot be merged is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.layers import calibration, errors, sample

from sagepatch.calibration.sample import Remedy, Sample
from sagepatch.calibration.table import LayerTable
from sagepatch.errors import InvalidArgument

FAST, SAFE = "triton.sage2_8", "triton.sage1_b"


def table(*rows: Sample) -> LayerTable:
    return LayerTable("a", "self", rows)


def row(number: int, cosine: float = 0.9995, us: float = 40.0, run: str = "") -> Sample:
    return sample(number, {FAST: cosine}, us={FAST: us}, us_exact=100.0, run=run)


def test_every_sample_counts() -> None:
    one, two = table(row(1, 0.999)), table(row(1, 0.998, 50.0), row(2), row(3, us=60.0))
    both = calibration(one).merge(calibration(two))
    (layer,) = both.layers
    assert (layer.samples, layer.us_exact) == (4, 100.0)
    summary = layer.candidates[FAST]
    assert (summary.cosine, summary.us) == (0.998, 50.0)
    assert summary.cosine_mean == pytest.approx((0.999 + 0.998 + 2 * 0.9995) / 4)
    turned = calibration(two).merge(calibration(one))
    assert turned.layers[0].candidates == layer.candidates
    assert turned.plan() == both.plan()


def test_a_sample_that_two_tables_hold_counts_once() -> None:
    kept = calibration(table(row(1, run="a"), row(2, run="a")))
    went_on = calibration(table(row(1, run="a"), row(2, run="a"), row(1, run="b")))
    assert kept.merge(went_on).layers[0].samples == 3
    unnamed = calibration(table(row(1)))
    assert unnamed.merge(unnamed).layers[0].samples == 2


# Once wrong: the last step of the shorter run was taken for the fourth of the longer one.
@pytest.mark.parametrize("turned", [False, True])
def test_one_prompt_with_other_steps_gives_other_samples(turned: bool) -> None:
    def of(steps: int, last: float):
        at = {call: (round((call - 1) * (steps - 1) / 3), steps) for call in (1, 2, 3, 4)}
        made = [
            sample(call, {FAST: last if call == 4 else 0.9999}, step=step, run="a")
            for call, step in at.items()
        ]
        return calibration(table(*made))

    short, long = of(4, 0.9), of(28, 0.9999)
    both = long.merge(short) if turned else short.merge(long)
    (layer,) = both.layers
    assert layer.samples == 8
    assert min(row.errors[FAST].worst.cosine for row in layer.rows if row.at > 0.9) == 0.9


def test_one_prompt_of_another_size_gives_other_samples() -> None:
    small = row(1, 0.9, run="a")
    large = replace(row(1, run="a"), shape="1x2x99x99x32 bf16")
    both = calibration(table(small)).merge(calibration(table(large)))
    assert [one.shape for one in both.layers[0].rows] == [small.shape, large.shape]


def test_calls_that_were_not_finite_add_up() -> None:
    one, two = replace(table(), spoilt=3), replace(table(), spoilt=2)
    both = calibration(one).merge(calibration(two))
    assert both.layers[0].spoilt == 5
    reason = both.plan().entries[0].reason
    assert reason == "inputs of this layer were not finite: stays exact"
    seen = both.merge(calibration(table(row(1))))
    assert seen.plan().entries[0].reason == (
        "only 1 of 2 samples seen, inputs of this layer were not finite in others: stays exact"
    )
    assert seen.plan(budget=0.1).entries[0].reason == seen.plan().entries[0].reason
    # Enough samples decide, whatever else was seen.
    assert seen.merge(calibration(table(row(2)))).plan().entries[0].variant == FAST


def test_runs_and_their_time_add_up() -> None:
    one = calibration(runs=("a",), run_seconds=1.0, measuring_seconds=0.5)
    two = calibration(runs=("b", "a"), run_seconds=2.0, measuring_seconds=1.0)
    both = one.merge(two)
    assert (both.runs, both.run_seconds, both.measuring_seconds) == (("a", "b"), 3.0, 1.5)


def test_one_process_whose_prompts_a_kernel_spoils_decides() -> None:
    good = calibration(table(row(1), row(2)))
    for bad in (row(1, 0.9), replace(row(1), errors={FAST: replace(errors(), finite=False)})):
        assert good.plan().entries[0].variant == FAST
        assert good.merge(calibration(table(bad))).plan().entries[0].variant == "sdpa.exact"


def test_a_candidate_refused_in_one_process_stays_refused() -> None:
    wide = calibration(table(sample(1, {FAST: 0.9995, SAFE: 0.9999})))
    narrow = calibration(table(replace(sample(1, {SAFE: 0.9999}), refused=(FAST,))))
    for both in (wide.merge(wide, narrow), narrow.merge(wide, wide)):
        assert list(both.layers[0].candidates) == [SAFE]
    unseen = calibration(table())
    assert wide.merge(unseen) == wide == unseen.merge(wide)
    assert unseen.merge(unseen) == unseen


def test_what_was_tried_is_kept_once() -> None:
    tried = Remedy("Q smoothing", "sage2_8", "call 1", 0.9999, 0.01, 1.0, None)
    one = calibration(replace(table(row(1, run="a")), remedies=(tried,)))
    assert one.merge(one).layers[0].remedies == (tried,)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fingerprint": "other"}, "different models"),
        ({"gpu": "another"}, "different GPUs cannot be merged: GPU, another"),
        ({"emulated": True}, "different settings of emulate"),
        ({"versions": {"torch": "3"}}, "different versions"),
    ],
)
def test_what_differs_is_named(changes, told) -> None:
    with pytest.raises(InvalidArgument, match=told):
        calibration(table()).merge(calibration(table(), **changes))


def test_gathering_needs_a_group() -> None:
    with pytest.raises(InvalidArgument, match="torchrun or accelerate launch, or use merge"):
        calibration(table()).gather()


# Once wrong: of one prompt seen by two processes the first one's heads decided.
def test_of_two_measurements_of_one_call_the_worse_counts() -> None:
    def table(cosine: float):
        rows = tuple(sample(n, {FAST: cosine, SAFE: 0.9999}, run="a") for n in (1, 2))
        return calibration(LayerTable("x", "self", rows), runs=("a",))

    for pair in ((table(0.9999), table(0.9)), (table(0.9), table(0.9999))):
        (layer,) = pair[0].merge(pair[1]).layers
        assert (layer.samples, layer.candidates[FAST].cosine) == (2, 0.9)


def test_what_one_process_had_no_time_for_is_taken_from_the_other() -> None:
    whole = sample(1, {FAST: 0.9999, SAFE: 0.99999}, run="a")
    short = replace(sample(1, {FAST: 0.9999}, run="a"), skipped=(SAFE,))
    failed = replace(sample(1, {FAST: 0.9999}, run="a"), refused=(SAFE,))

    def names(*rows):
        tables = [calibration(LayerTable("x", "self", (row,)), runs=("a",)) for row in rows]
        return tables[0].merge(*tables[1:]).layers[0].names

    assert set(names(whole, short)) == set(names(short, whole)) == {FAST, SAFE}
    # It was tried and could not serve.
    assert set(names(whole, failed)) == {FAST}


def test_tables_of_different_layers_are_refused_in_a_sentence() -> None:
    def of(*sites: str):
        return calibration(*(replace(table(row(1)), site=site) for site in sites))

    one, two, turned = of("a", "b"), of("b"), of("b", "a")
    with pytest.raises(InvalidArgument, match=r"different layers.*2, 1 layers, not in all: a;"):
        one.merge(two)
    with pytest.raises(InvalidArgument, match=r"different layers.*in another order"):
        one.merge(turned)
    many = of(*(f"x{n}" for n in range(9)))
    with pytest.raises(InvalidArgument, match=r"not in all: a, x0, x1, x2;"):
        of("a").merge(many)
