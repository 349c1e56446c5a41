"""The report as one HTML page: no network, no script but its own, everything escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagepatch.calibration.choose import error_bound
from sagepatch.report.differences import worded
from sagepatch.report.facts import bound_of, facts
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.pictures import DIFFERENCE_GAIN, Comparison, difference, png_bytes
from sagepatch.report.printable import finite_deep
from sagepatch.report.summary import grouped, shares
from sagepatch.report.tiles import lead, tiles

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
# Shades of an error, from nothing to the bound.
SHADES = 10


def render(report: Report) -> str:
    """The page as text."""
    bound = bound_of(report)
    attention = report.attention()
    table = facts(report)
    parts = shares(report.layers)
    environment = _environment()
    return environment.get_template("report.html").render(
        report=report,
        lead=lead(report),
        tiles=tiles(report),
        counts=report.counts,
        attention=None if attention is None else attention.sentence(),
        timed=any(row.us_exact is not None for row in report.layers),
        pictures=None if report.pictures is None else _pictures(report.pictures),
        bound=bound,
        stepped=any(row.worst_step is not None for row in report.layers),
        rows=[
            (row, worded(row.variant, row.ranges), _cells(row, bound), share)
            for row, share in zip(report.layers, parts, strict=True)
        ],
        most=max((part for part in parts if part is not None), default=1.0),
        left=grouped((layer.name, layer.reason) for layer in report.left),
        machine=[(str(name), _plain(value)) for name, value in report.machine.items()],
        shades=SHADES,
        style=_asset("report.css"),
        script=_script(),
        script_hash=_hash(_script()),
        facts=None if table is None else _data(table),
        plans=_choices(report),
        measured=[] if table is None else [name for name in table["kernels"]][:-1],
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(text: str) -> Markup:
    """A name that a narrow column breaks after its dots only, where that is enough."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(
        escape(part) for part in text.replace(".", ".\n").split("\n") if part
    )


@cache
def _asset(name: str) -> Markup:
    """A file of our own, as it stands."""
    from markupsafe import Markup

    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _script() -> Markup:
    return _asset("solve.js") + _asset("plans.js") + _asset("heat.js") + _asset("page.js")


def _hash(script: str) -> Markup:
    """What lets this script, and no other, run under the page's policy."""
    from markupsafe import Markup

    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return Markup(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")


def _data(value: Any) -> Markup:
    """JSON that no text in it can end early."""
    from markupsafe import Markup

    text = json.dumps(finite_deep(value), allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _choices(report: Report) -> list[tuple[str, str]]:
    """What the page offers as plan A and plan B."""
    return [
        ("force", "the plan in force"),
        ("slider", "the slider's threshold"),
        ("exact", "exact everywhere"),
        *((f"plan:{name}", name) for name, _ in report.plans),
    ]


def _cells(row: LayerRow, threshold: float) -> list[dict[str, object]]:
    """One cell a metric: its text, and its shade (0 to `SHADES`, None for what was not measured)
    relative to what the threshold admits.
    """
    worst = error_bound(threshold)
    return [
        _cell(row.cosine, "%.5f", 1.0, 1 - threshold, below=True),
        _cell(row.rel_l1, "%.4f", 0.0, worst),
        _cell(row.norm_ratio, "%.4f", 1.0, worst),
    ]


def _cell(
    value: float | None, form: str, perfect: float, worst: float, *, below: bool = False
) -> dict[str, object]:
    """`worst` is the admitted distance from `perfect`; `below` where only less is an error."""
    if value is None:
        return {"text": "-", "shade": None}
    error = perfect - value if below else abs(value - perfect)
    part = min(1.0, max(0.0, error) / worst) if error == error else 1.0
    return {"text": form % value, "shade": round(SHADES * part)}


def _pictures(comparison: Comparison) -> dict[str, object]:
    """Sources, captions and scores; no sources where only the scores are known."""
    shown: list[tuple[str, str]] = []
    if comparison.worst_pair is not None:
        exact, quantised = comparison.worst_pair
        apart = difference(exact, quantised)
        shown = [
            (_data_uri(png_bytes(exact)), "exact attention"),
            (_data_uri(png_bytes(quantised)), "quantised, by this plan"),
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
