"""The page of whole forwards says what the measurements say now, and judges them as it claims."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import end_to_end_page  # noqa: E402
from end_to_end_rows import Measured, measured  # noqa: E402


def test_the_page_is_current() -> None:
    wanted = end_to_end_page.page()
    page = end_to_end_page.PAGE.read_text(encoding="utf-8")
    assert page == wanted, "run: python benchmarks/end_to_end_page.py"


def one(
    whole: tuple[float, float],
    attention: float,
    alone: tuple[float, float] = (40, 20),
    host_ms: float = 1,
    parts: bool = True,
) -> Measured:
    """A model whose forward takes `whole` milliseconds before and after, its attention so many
    before, and so many before and after where it is timed alone.
    """
    rows, told = {}, {}
    for mode, ms, alone_ms in zip(("unpatched", "calibrated"), whole, alone, strict=True):
        rows[mode] = {"ms_median": str(ms), "speedup": str(whole[0] / ms)}
        told[mode] = {"attention_alone_ms": str(alone_ms), "host_ms": str(host_ms)}
        told[mode]["attention_ms"] = str(attention)
    return Measured("model", False, rows, told if parts else {})


@pytest.mark.parametrize(
    ("found", "aim", "words"),
    [
        # 0.1 of the time, halved: 1 / 0.95.
        (one((100, 95), 10), 1.2, "out of reach even were it free (1.11x)"),
        # 0.5 of the time: 1 / 1.4 leaves 0.214 for attention; 20 of 50 ms were saved.
        (one((100, 80), 50), 1.4, "50%, needs 2.33x, had 1.67x, alone 2.00x: the kernel's speed"),
        (one((100, 80), 50, host_ms=79), 1.4, "alone 2.00x; the host is busy to the end"),
        (one((100, 80), 50, (40, 10)), 1.4, "had 1.67x, alone 4.00x: guard, host and clocks"),
        (one((100, 80), 50, parts=False), 1.4, "missed; attention was not timed in place"),
    ],
)
def test_what_binds(found: Measured, aim: float, words: str) -> None:
    assert words in end_to_end_page.binds(found, aim)


def test_the_last_row_of_a_mode_counts_and_only_parts_of_its_run(tmp_path: Path) -> None:
    head = "model,mode,compile,ms_median,speedup,commit\n"
    rows = "m,unpatched,False,10,1,a\nm,calibrated (480p),False,5,2,a\nm,unpatched,False,12,1,b\n"
    (tmp_path / "h200_end_to_end.csv").write_text(head + rows)
    parts = (
        "model,mode,compile,attention_ms,commit\nm,unpatched,False,6,a\nm,calibrated,False,2,a\n"
    )
    (tmp_path / "h200_end_to_end_parts.csv").write_text(parts)
    (found,) = measured(tmp_path)
    assert (found.unpatched_ms, found.speedup(), found.compiled) == (12, 2, False)
    assert found.attention_ms("unpatched") is None
    assert found.attention_ms("calibrated") == 2
    assert found.share is None


@pytest.mark.parametrize(
    ("kernels", "told"),
    [
        ("140 sdpa.exact", "1.06x (all layers exact)"),
        ("139 sdpa.exact; 1 cuda.sage2_8", "1.06x"),
        ("140 cuda.sage2_8", "1.06x"),
    ],
)
def test_a_speed_of_exact_layers_alone_says_so(kernels: str, told: str) -> None:
    found = one((106, 100), 10)
    found.parts["calibrated"]["kernels"] = kernels
    assert found.told() == told
    assert one((106, 100), 10, parts=False).told() == "1.06x"
