"""The report as one HTML page: no network, no script, everything escaped."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagepatch.calibration.choose import error_bound
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.pictures import DIFFERENCE_GAIN, Comparison, difference, png_bytes
from sagepatch.report.summary import grouped

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
# Shades of the heat map, from nothing to the bound.
SHADES = 10
# What the shades are relative to where the threshold admits everything or nothing.
_USUAL_THRESHOLD = 0.998


def render(report: Report) -> str:
    """The page as text."""
    bound = report.threshold if 0 < report.threshold < 1 else _USUAL_THRESHOLD
    attention = report.attention()
    return _template().render(
        report=report,
        counts=report.counts,
        attention=None if attention is None else attention.sentence(),
        timed=any(row.us_exact is not None for row in report.layers),
        pictures=None if report.pictures is None else _pictures(report.pictures),
        bound=bound,
        heat=[(row, _heat(row, bound)) for row in report.layers],
        left=grouped((layer.name, layer.reason) for layer in report.left),
        machine=[(str(name), _plain(value)) for name, value in report.machine.items()],
        shades=SHADES,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _heat(row: LayerRow, threshold: float) -> list[dict[str, object]]:
    """One cell a metric: its text, and its shade (0 to `SHADES`, None for what was not measured)
    relative to what the threshold admits.
    """
    cosine = None if row.cosine is None else max(0.0, 1 - row.cosine)
    norm = None if row.norm_ratio is None else abs(row.norm_ratio - 1)
    errors = ((cosine, 1 - threshold), (row.rel_l1, error_bound(threshold)))
    return [_cell(error, worst) for error, worst in (*errors, (norm, error_bound(threshold)))]


def _cell(error: float | None, worst: float) -> dict[str, object]:
    if error is None:
        return {"text": "-", "shade": None}
    return {"text": f"{error:.1e}", "shade": round(SHADES * min(1.0, error / worst))}


def _pictures(comparison: Comparison) -> dict[str, object]:
    """Sources, captions and scores; no sources where only the scores are known."""
    shown: list[tuple[str, str]] = []
    if comparison.worst_pair is not None:
        exact, quantised = comparison.worst_pair
        apart = difference(exact, quantised)
        shown = [
            (_data_uri(png_bytes(exact)), "exact attention"),
            (_data_uri(png_bytes(quantised)), "quantised, by the plan below"),
            (_data_uri(png_bytes(apart)), f"difference, {DIFFERENCE_GAIN} times as bright"),
        ]
    frame = None
    if comparison.count > 1:
        frame = f"Picture {comparison.worst + 1} of {comparison.count}, the one that differs most."
    return {
        "shown": shown,
        "sentence": comparison.sentence(),
        "frame": frame,
        "faults": comparison.faults(),
    }


def _plain(value: Any) -> str:
    """A value of the machine's description on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(_plain, value)) or "none"
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
