"""What docs/parallel.md says of an exchange of codes is what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import ulysses_page


def test_the_page_shows_the_table_of_what_was_measured() -> None:
    assert ulysses_page.PAGE.read_text() == ulysses_page.page()


def test_what_the_page_concludes_holds_in_every_row() -> None:
    rows = {(row["shape"], row["way"]): row for row in ulysses_page.rows()}
    for shape in ulysses_page.SIZES:
        once, codes = (rows[shape, way] for way in ("one exchange, ours", "codes, ours"))
        saved = 1 - float(codes["sent_mb"]) / float(once["sent_mb"])
        assert 0.36 < saved < 0.38
        # Not beyond what rounds of one way differ by.
        assert float(codes["ms_median"]) > float(once["ms_p20"])
        assert codes["cos"][:7] == once["cos"][:7]
        assert float(once["ms_median"]) < float(rows[shape, "diffusers, torch"]["ms_median"])
