"""The report as one HTML page: no network, no script, everything escaped."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sagepatch.report.model import Report
from sagepatch.report.pictures import png_bytes

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE = Path(__file__).parent / "templates" / "report.html"
# The metrics of the heat map: column title, field, value of a harmless layer, value of a bad one.
_METRICS = (
    ("1 - cosine", "cosine", 0.0, 0.002),
    ("relative L1", "rel_l1", 0.0, 0.063),
    ("norm ratio - 1", "norm_ratio", 0.0, 0.063),
)


def render(report: Report) -> str:
    """The page as text."""
    pictures = None
    if report.pictures is not None:
        pictures = {
            "exact": _data_uri(png_bytes(report.pictures.exact[0])),
            "quantised": _data_uri(png_bytes(report.pictures.quantised[0])),
            "sentence": report.pictures.sentence(),
        }
    return _template().render(
        report=report,
        pictures=pictures,
        heat=[[_cell(row, metric) for metric in _METRICS] for row in report.layers],
        metric_names=[metric[0] for metric in _METRICS],
        machine=json.dumps(report.machine, indent=1),
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _cell(row: object, metric: tuple[str, str, float, float]) -> dict[str, object]:
    """Text and heat (0 to 10, None for unmeasured) of one metric of one layer."""
    _, field, good, bad = metric
    value = getattr(row, field)
    if value is None:
        return {"text": "-", "heat": None}
    error = abs(1 - value) if field in ("cosine", "norm_ratio") else value
    return {"text": f"{error:.2e}", "heat": round(10 * min(1.0, max(0.0, (error - good) / bad)))}


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
