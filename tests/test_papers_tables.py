"""The papers' accuracy tables beside ours: every printed line is measured, and smoothing does for
INT4 what it is for.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sagepatch.numerics.exact import exact
from sagepatch.numerics.metrics import compare

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, for as long as a test runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    import papers_tables

    yield papers_tables
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def test_every_printed_line_is_in_the_table(papers: Any) -> None:
    with (BENCHMARKS / "papers_tables.csv").open(newline="", encoding="utf-8") as file:
        kept = [
            (r["paper"], r["table"], r["setting"], r["theirs_cosine"], r["data"], r["over"])
            for r in csv.DictReader(file)
        ]
    assert kept == [
        (
            *(f"arXiv {row.paper}", row.table, row.setting),
            "" if row.printed.cosine is None else f"{row.printed.cosine:g}",
            *(row.data, row.over),
        )
        for row in papers.lines()
    ]
    assert {paper for paper, *_ in kept} == {
        f"arXiv {number}" for number in ("2410.02367", "2411.10958", "2505.21136", "2407.08608")
    }


def test_int4_needs_both_smoothings_where_queries_and_keys_share_vectors(papers: Any) -> None:
    import papers_four_bits

    call = papers_four_bits.biased_q_and_k()
    wanted = exact(call)[0]
    rows = {
        r.setting: r for r in papers_four_bits.smoothings() if r.data == papers_four_bits.ON_BOTH
    }
    error = {name: compare(row.run(call), wanted).whole.rel_l1 for name, row in rows.items()}
    best, *others = sorted(error, key=error.__getitem__)
    assert best == "Q and K smoothed"
    assert error[best] < 0.5 * error[others[0]]
    assert set(others[:2]) == {"K smoothed", "Q smoothed"}
