"""The report in a terminal, through rich."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sagepatch.report.model import LayerRow, Report

_COLOURS = {"fast": "green", "safe": "cyan", "exact": "yellow"}


def render(report: Report, width: int) -> Iterator[Any]:
    """Headline, remarks, one line a layer, and the layers left alone with their reasons."""
    yield Text(report.headline(), style="bold")
    for remark in report.remarks():
        yield Text(remark, style="yellow")
    if report.layers:
        yield _layers(report, width)
    if report.left:
        yield _left(report)
    for row in report.layers:
        if row.replaced_by is not None:
            lost = f"{row.name}: no longer patched: replaced by {row.replaced_by}"
            yield Text(lost, style="red")
        for reason, count in row.fallbacks.items():
            yield Text(f"{row.name}: {count} calls ran exact ({reason})", style="dim")
        for note in row.notes:
            yield Text(f"{row.name}: {note}", style="yellow")
    if report.pictures is not None:
        yield Text(report.pictures.sentence(), style="bold")


def render_text(report: Report, width: int = 120) -> str:
    """The same as plain text of a fixed width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(report)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _layers(report: Report, width: int) -> Table:
    timed = any(row.us_exact is not None for row in report.layers)
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    longest = max(len(row.name) for row in report.layers)
    named = min(longest, width // 3)
    table.add_column("layer", overflow="fold", min_width=named, max_width=named)
    table.add_column("kind")
    table.add_column("kernel", overflow="fold", min_width=min(19, width // 5))
    table.add_column("cosine", justify="right", no_wrap=True, min_width=7)
    table.add_column("rel L1", justify="right", no_wrap=True, min_width=6)
    table.add_column("head", justify="right")
    if timed:
        table.add_column("us exact", justify="right", min_width=5)
        table.add_column("us now", justify="right", min_width=5)
    table.add_column("calls", justify="right", min_width=5)
    # Narrow terminals keep the numbers; the sentences are in every other format too.
    with_reasons = width >= 100
    if with_reasons:
        table.add_column("why", overflow="ellipsis", no_wrap=True, max_width=44)
    for row in report.layers:
        cells: list[Any] = [
            Text(row.name),
            row.kind,
            Text(row.variant, style=_COLOURS[row.tier]),
            _number(row.cosine, ".5f"),
            _number(row.rel_l1, ".4f"),
            "-" if row.worst_head is None else str(row.worst_head),
        ]
        if timed:
            cells += [_number(row.us_exact, ".0f"), _number(row.us_chosen, ".0f")]
        cells.append(f"{row.quantised_calls}/{row.calls}")
        if with_reasons:
            cells.append(Text(_why(row)))
        table.add_row(*cells)
    return table


def _left(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title=None)
    table.add_column("left alone", overflow="fold")
    table.add_column("why", overflow="fold")
    for layer in report.left:
        table.add_row(Text(layer.name), Text(layer.reason))
    return table


def _why(row: LayerRow) -> str:
    if row.replaced_by is not None:
        return f"no longer patched: replaced by {row.replaced_by}"
    return row.reason


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
