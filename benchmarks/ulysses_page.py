"""Writes the table of docs/parallel.md from ulysses_exchange.csv beside this file.

python benchmarks/ulysses_page.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from page_text import table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "parallel.md"
BEGIN, END = "<!-- exchange -->\n", "\n<!-- /exchange -->"
WAYS = ("diffusers, torch", "diffusers, ours", "one exchange, ours", "codes, ours")
SIZES = {
    "flux_1024": "FLUX at 1024, 4,608 tokens, 24 heads",
    "flux_2048": "FLUX at 2048, 16,896 tokens, 24 heads",
    "wan_14b_480p": "Wan 14B at 480p, 32,768 tokens, 40 heads",
    "hunyuan_720p": "HunyuanVideo at 720p, 119,040 tokens, 24 heads",
}


def rows() -> list[dict[str, str]]:
    """What was measured."""
    with (HERE / "ulysses_exchange.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def exchange() -> str:
    """Milliseconds by shape and way, and how many times as fast as diffusers over torch."""
    found = {(row["shape"], row["way"]): row for row in rows()}

    def cell(shape: str, way: str) -> str:
        row = found[shape, way]
        gain = "" if way == WAYS[0] else f" ({float(row['speedup']):.2f}x)"
        return f"{float(row['ms_median']):.3g}{gain}"

    head = ["call", "diffusers' exchanges, torch", "the same, ours", "one exchange", "codes"]
    return table(head, [[SIZES[shape], *(cell(shape, way) for way in WAYS)] for shape in SIZES])


def page() -> str:
    """The page with its table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{exchange()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
