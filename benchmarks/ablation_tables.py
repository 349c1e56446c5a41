"""Reads the measurements of ablations beside this file, for the page and the pictures of them."""

from __future__ import annotations

import csv
from pathlib import Path

from page_text import table as markdown

HERE = Path(__file__).parent
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """A table beside this file."""
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Ablations:
    """The measurements by ablation, setting and data set."""

    def __init__(self) -> None:
        self.rows = rows("ablations.csv")
        self._by_key = {(r["ablation"], r["setting"], r["data"]): r for r in self.rows}

    def one(self, ablation: str, setting: str, data: str) -> Row:
        """One measurement."""
        return self._by_key[ablation, setting, data]

    def settings(self, ablation: str) -> list[str]:
        """The settings of an ablation, in order."""
        return list(dict.fromkeys(r["setting"] for r in self.rows if r["ablation"] == ablation))

    def data(self, ablation: str) -> list[str]:
        """Its data sets, in order."""
        return list(dict.fromkeys(r["data"] for r in self.rows if r["ablation"] == ablation))

    def l1(self, ablation: str, setting: str, data: str) -> float:
        """Relative L1, mean of the calls."""
        return float(self.one(ablation, setting, data)["rel_l1"])

    def change(self, ablation: str, setting: str, base: str, data: str) -> str:
        """How much more a setting errs than another, in per cent."""
        ratio = self.l1(ablation, setting, data) / self.l1(ablation, base, data)
        # Added to zero: no "-0.0".
        return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"

    def table(self, ablation: str, column: str = "rel_l1", first: str = "setting") -> str:
        """A column of an ablation as a table, data sets across."""
        across = self.data(ablation)
        return markdown(
            (first, *across),
            (
                (setting, *(self.one(ablation, setting, name)[column] for name in across))
                for setting in self.settings(ablation)
            ),
        )
