"""The report as a PNG plot: each layer's errors and times, coloured by tier, and the errors by
step. Needs matplotlib.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sagepatch.calibration.choose import error_bound
from sagepatch.errors import MachineError
from sagepatch.plan import write_bytes
from sagepatch.report.facts import Step, bound_of, errors_of_row, steps_of
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.printable import printable

if TYPE_CHECKING:
    from sagepatch.calibration.table import Calibration

_COLOURS = {"fast": "#2a9d58", "safe": "#2b7bba", "exact": "#b8860b"}
_LIMIT, _EXACT_TIME, _PALE = "#b03030", "#c3cbc6", "#707a74"
# Less than this is rounding: the axis of 1 - cosine starts here.
_SMALLEST = 1e-7
_DPI = 120
_ROW_INCHES, _TALLEST_INCHES = 0.26, 60.0
# Beyond this many layers only some are named.
_MOST_LABELS = 200
_LONGEST_NAME = 60
_STEP_INCHES, _MOST_STEPS = 0.3, 24
_PAPER = "#f2f5f0"


def render(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the plot; raises `MachineError` without matplotlib or a place to write."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(
            'plots need matplotlib: pip install "sagepatch[plot]", or ask for .html or .json'
        ) from error
    rows = report.layers
    timed = any(row.us_exact is not None for row in rows)
    steps = [] if report.calibration is None else steps_of(report.calibration.layers)
    tall = min(_TALLEST_INCHES, 2.2 + _ROW_INCHES * max(3, len(rows)))
    wide = 10.5 + 2.5 * timed + (1.5 + min(_STEP_INCHES * len(steps), 6.0) if steps else 0)
    figure = Figure(figsize=(wide, tall), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 + timed + bool(steps), sharey=True)
    _errors(axes[0], report, "cosine")
    axes[0].set_xscale("log")
    axes[0].set_xlim(left=_SMALLEST, right=1)
    axes[0].set_xlabel("1 - cosine, worst head")
    _errors(axes[1], report, "rel_l1")
    axes[1].set_xlim(left=0)
    axes[1].set_xlabel("relative L1, worst head")
    if timed:
        _times(axes[2], rows)
    if steps and report.calibration is not None:
        _heat(figure, axes[-1], report, report.calibration, steps)
    labelled = range(0, len(rows), -(-len(rows) // _MOST_LABELS) or 1)
    labels = [f"{_short(rows[place].name)}  {rows[place].variant}" for place in labelled]
    # A layer's name is no formula, whatever signs are in it.
    axes[0].set_yticks(labelled, labels, fontsize=7, parse_math=False)
    axes[0].set_ylim(max(len(rows), 1) - 0.4, -0.6)
    for one in axes[: 2 + timed]:
        one.grid(axis="x", color="#e3e7e3", linewidth=0.6)
        one.set_axisbelow(True)
    figure.suptitle(_title(report), fontsize=9, parse_math=False)
    _legend(figure, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    write_bytes(path, buffer.getvalue())


def _errors(axis: Any, report: Report, metric: str) -> None:
    """A dot a measured layer, a word where there is none, a line at what is admitted."""
    limit = error_bound(report.threshold)
    if metric == "cosine":
        limit = 1 - report.threshold
    if 0 < limit < 1:
        axis.axvline(limit, color=_LIMIT, linestyle="--", linewidth=1)
    places: dict[str, list[int]] = {tier: [] for tier in _COLOURS}
    errors: dict[str, list[float]] = {tier: [] for tier in _COLOURS}
    for place, row in enumerate(report.layers):
        value = getattr(row, metric)
        if value is not None:
            places[row.tier].append(place)
            error = max(1 - value, _SMALLEST) if metric == "cosine" else value
            errors[row.tier].append(error)
        elif len(report.layers) <= _MOST_LABELS:
            word = "exact" if row.tier == "exact" else "not measured"
            where = (0.02, place)
            place_in = ("axes fraction", "data")
            axis.annotate(word, where, xycoords=place_in, fontsize=6, color=_PALE, va="center")
    for tier, colour in _COLOURS.items():
        axis.plot(errors[tier], places[tier], "o", color=colour, markersize=5)


def _times(axis: Any, rows: Sequence[LayerRow]) -> None:
    """Exact attention as a pale bar, what the layer runs as a narrow one on it."""
    places = range(len(rows))
    axis.barh(places, [row.us_exact or 0.0 for row in rows], color=_EXACT_TIME, height=0.7)
    chosen = [row.us_chosen or 0.0 for row in rows]
    axis.barh(places, chosen, color=[_COLOURS[row.tier] for row in rows], height=0.35)
    axis.set_xlabel("us a call: exact (pale), now")


def _heat(
    figure: Any, axis: Any, report: Report, table: Calibration, steps: Sequence[Step]
) -> None:
    """Layers by denoising steps: 1 - cosine of what each runs there, up to what is admitted."""
    import numpy as np

    worst = 1 - bound_of(report)
    layers = {printable(layer.site): layer for layer in table.layers}
    shown = np.full((max(len(report.layers), 1), len(steps)), np.nan)
    for place, row in enumerate(report.layers):
        if row.name in layers:
            for column, error in enumerate(errors_of_row(layers[row.name], row, steps)):
                shown[place, column] = np.nan if error is None else error
    mesh = axis.imshow(
        shown, aspect="auto", cmap="OrRd", vmin=0, vmax=worst, interpolation="nearest"
    )
    axis.set_facecolor(_PAPER)
    every = -(-len(steps) // _MOST_STEPS)
    named = range(0, len(steps), every)
    names = [steps[column].name for column in named]
    axis.set_xticks(named, names, fontsize=6, rotation=60, parse_math=False)
    axis.set_xlabel("1 - cosine by step (blank: exact)")
    figure.colorbar(mesh, ax=axis, extend="max", shrink=0.6).ax.tick_params(labelsize=6)


def _legend(figure: Any, rows: Sequence[LayerRow]) -> None:
    from matplotlib.lines import Line2D

    tiers = [tier for tier in _COLOURS if any(row.tier == tier for row in rows)]
    marks = [Line2D([], [], color=_COLOURS[t], marker="o", linestyle="", label=t) for t in tiers]
    limit = Line2D([], [], color=_LIMIT, linestyle="--", label="threshold")
    figure.legend(handles=[*marks, limit], loc="outside lower center", ncols=4, fontsize=8)


def _title(report: Report) -> str:
    emulated = "\nEmulated kernels: accuracy, not speed" if report.emulates else ""
    return report.headline() + emulated


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else "..." + name[-_LONGEST_NAME:]
