"""The report as a PNG plot: each layer's errors, coloured by tier. Needs matplotlib."""

from __future__ import annotations

import io
import os

from sagepatch.errors import MachineError
from sagepatch.plan import write_bytes
from sagepatch.report.model import Report

_COLOURS = {"fast": "#2a9d58", "safe": "#2b7bba", "exact": "#c9a227"}


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
    figure = Figure(figsize=(9, 2 + 0.28 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    places = list(range(len(rows)))
    colours = [_COLOURS[row.tier] for row in rows]
    lost = [0.0 if row.cosine is None else max(1 - row.cosine, 1e-9) for row in rows]
    axes[0].barh(places, lost, color=colours)
    axes[0].axvline(1 - report.threshold, color="#b03030", linestyle="--", linewidth=1)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("1 - cosine (worst head; dashed: threshold)")
    axes[1].barh(places, [row.rel_l1 or 0.0 for row in rows], color=colours)
    axes[1].set_xlabel("relative L1 (worst head)")
    axes[0].set_yticks(places, [f"{row.name}  {row.variant}" for row in rows], fontsize=7)
    axes[0].invert_yaxis()
    figure.suptitle(report.headline(), fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getvalue())
