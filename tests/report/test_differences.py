"""Two plans of one model side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report.report_rows import EXACT, RANGED, REPORT, ROW
from report.tables import report_of_plan, table

from sagepatch.errors import InvalidArgument
from sagepatch.plan import Plan, PlanEntry
from sagepatch.report.differences import Difference, differences, worded

PLAN = Plan("f" * 16, "FluxPipeline", 0.99, False, "CPU", {}, ())


def _entry(site: str, variant: str, **more: object) -> PlanEntry:
    return PlanEntry(site, "joint", variant, 1, "asked", **more)  # type: ignore[arg-type]


def test_a_plan_does_not_differ_from_itself() -> None:
    plan = table(1).plan(0.998)
    assert differences(report_of_plan(plan).layers, plan) == ()


def test_each_layer_that_differs_and_by_how_much() -> None:
    entries = (
        _entry(ROW.name, "triton.sage1_b", cosine=0.9999, us_exact=442.0, us_chosen=400.0),
        _entry(EXACT.name, "sdpa.exact"),
        _entry(RANGED.name, RANGED.variant, ranges=RANGED.ranges),
    )
    found = differences((ROW, EXACT, RANGED), replace(PLAN, entries=entries))
    assert found == (
        Difference(ROW.name, ROW.variant, "triton.sage1_b", 0.99931, 0.9999, 331.0, 400.0),
    )


def test_a_layer_that_a_plan_does_not_name_is_exact_in_it() -> None:
    (found,) = differences((ROW, EXACT), PLAN)
    assert (found.there, found.cosine_there, found.us_there) == ("sdpa.exact", None, 442.0)


def test_ranges_count() -> None:
    (found,) = differences((RANGED,), replace(PLAN, entries=(_entry(RANGED.name, "sdpa.exact"),)))
    assert found.here == "triton.sage1_b to 87.5 %, sdpa.exact to 100 %"
    assert worded("sdpa.exact", ()) == "sdpa.exact"


def test_a_plan_of_another_model() -> None:
    other = replace(PLAN, entries=(_entry("other.attn", "sdpa.exact"),))
    with pytest.raises(InvalidArgument, match=r"names 1 layers .* such as other.attn"):
        REPORT.with_plan("other", other)
