"""Tables of several processes as one: the worst error counts, and what cannot be merged is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.layers import summary

from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.errors import InvalidArgument

FAST, SAFE = "triton.sage2_8", "triton.sage1_b"


def table(*candidates, site: str = "a", samples: int = 3, us: float | None = 100.0) -> LayerTable:
    named = {one.variant: one for one in candidates}
    return LayerTable(site, "self", samples, ("1x2x9x9x32 bf16",), "bf16", us, 2.0, named)


def calibration(*layers: LayerTable, **changes) -> Calibration:
    return replace(Calibration("print", "Model", False, "GPU", {"torch": "2"}, layers), **changes)


def test_every_error_is_the_worst_and_the_mean_is_over_samples() -> None:
    one = summary(FAST, 0.999, 40.0, cosine_mean=0.9996, rel_l1=0.05, norm_ratio=1.01, samples=1)
    two = summary(FAST, 0.998, 50.0, cosine_mean=0.9992, norm_ratio=0.98, worst_head=7, samples=3)
    both = calibration(table(one, samples=1, us=90.0)).merge(calibration(table(two)))
    (layer,) = both.layers
    assert (layer.samples, layer.us_exact) == (4, 100.0)
    assert layer.candidates[FAST] == replace(
        two, rel_l1=0.05, cosine_mean=pytest.approx(0.9993), samples=4
    )
    assert both == calibration(table(two)).merge(calibration(table(one, samples=1, us=90.0)))


def test_one_process_whose_prompts_a_kernel_spoils_decides() -> None:
    good = calibration(table(summary(FAST, us=40.0)))
    for bad in (summary(FAST, 0.9, 40.0), summary(FAST, us=40.0, finite=False)):
        assert good.plan().entries[0].variant == FAST
        assert good.merge(calibration(table(bad))).plan().entries[0].variant == "sdpa.exact"


def test_a_candidate_must_have_served_in_every_process_that_saw_the_layer() -> None:
    wide = calibration(table(summary(FAST), summary(SAFE)))
    narrow = calibration(table(summary(SAFE)))
    assert list(wide.merge(narrow).layers[0].candidates) == [SAFE]
    unseen = calibration(table(samples=0, us=None))
    assert wide.merge(unseen) == wide == unseen.merge(wide)
    assert unseen.merge(unseen) == unseen


def test_merging_one_changes_nothing_and_order_of_many_does_not_matter() -> None:
    made = [
        calibration(table(summary(FAST, 0.999 - i / 1e4, 40.0 + i, samples=2), samples=2))
        for i in range(3)
    ]
    assert made[0].merge() == made[0]
    a, b, c = made
    assert a.merge(b, c) == c.merge(a, b)


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
