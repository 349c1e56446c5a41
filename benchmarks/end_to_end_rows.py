"""Reads the measurements of whole forwards beside this file: the last of each model and mode."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
UNPATCHED, CALIBRATED, SAFE = "unpatched", "calibrated", "safe"
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """One model at one size, compiled or not: rows by mode, without the inputs of a plan, and where
    their time goes, as far as it was looked at.
    """

    model: str
    compiled: bool
    rows: dict[str, Row]
    parts: dict[str, Row]

    @property
    def name(self) -> str:
        """The model without the layers that are kept."""
        return self.model.partition(" (")[0]

    @property
    def unpatched_ms(self) -> float:
        return float(self.rows[UNPATCHED]["ms_median"])

    def host_ms(self, mode: str) -> float:
        """When the host had handed over the last launch of a forward."""
        return float(self.parts[mode]["host_ms"])

    def calls(self, mode: str) -> dict[str, int]:
        """Attention calls of a forward by kernel."""
        served = (part.split(" ", 1) for part in self.parts[mode]["kernels"].split("; "))
        return {kernel: int(count) for count, kernel in served}

    def stays_exact(self, mode: str = CALIBRATED) -> bool:
        """Whether no kernel of ours runs in a mode: what its speed differs by is scatter."""
        return mode in self.parts and set(self.calls(mode)) == {"sdpa.exact"}

    def told(self, mode: str = CALIBRATED) -> str:
        """The speed as tables have it, with a word where all layers stay exact."""
        return f"{self.speedup(mode):.2f}x" + " (all layers exact)" * self.stays_exact(mode)

    def speedup(self, mode: str = CALIBRATED) -> float:
        return float(self.rows[mode]["speedup"])

    def predicted(self, mode: str = CALIBRATED) -> float:
        return float(self.rows[mode]["predicted_speedup"])

    def attention_ms(self, mode: str) -> float | None:
        """All attention of a forward, timed in place; None where it was not."""
        part = self.parts.get(mode)
        return None if part is None else float(part["attention_ms"])

    @property
    def share(self) -> float | None:
        """Of the unpatched forward that attention takes."""
        attention = self.attention_ms(UNPATCHED)
        return None if attention is None else attention / self.unpatched_ms

    def kernels_gain(self, mode: str = CALIBRATED) -> float | None:
        """How much faster the attention of a forward is, each kind of call timed alone."""
        if UNPATCHED not in self.parts or mode not in self.parts:
            return None
        before, after = (float(self.parts[m]["attention_alone_ms"]) for m in (UNPATCHED, mode))
        return before / after

    def attention_gain(self, mode: str = CALIBRATED) -> float | None:
        """How much faster attention would have to be for the forward to take what it takes, were
        all the rest as it was; infinity where attention could not have saved so much.
        """
        attention = self.attention_ms(UNPATCHED)
        if attention is None:
            return None
        left = attention - self.unpatched_ms + float(self.rows[mode]["ms_median"])
        return attention / left if left > 0 else float("inf")


def measured(folder: Path = HERE, name: str = "h200_end_to_end") -> list[Measured]:
    """Everything that was measured, in the order of the file."""
    rows = _by_model(read(folder / f"{name}.csv"))
    parts = _by_model(read(folder / f"{name}_parts.csv"))
    found = []
    for (model, compiled), modes in rows.items():
        # Of another run than the times they would explain nothing.
        told = {
            mode: part
            for mode, part in parts.get((model, compiled), {}).items()
            if mode in modes and part["commit"] == modes[mode]["commit"]
        }
        found.append(Measured(model, compiled == "True", modes, told))
    return found


def _by_model(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        mode = row["mode"].partition(" ")[0]
        found.setdefault((row["model"], row["compile"]), {})[mode] = row
    return found


def read(path: Path) -> list[Row]:
    """The rows of a file, none where there is none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
