"""The report in a terminal, through rich; readable from 80 columns on, plain where there are no
colours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sagepatch.report.differences import worded
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.summary import counted, grouped

_COLOURS = {"fast": "green", "safe": "cyan", "exact": "yellow"}
_PADDING = 2
# No column of words is narrower, and the reasons (every other format has them) want as much.
_NARROWEST = 14
_NAMES_SHOWN = 3
# Columns that are left out where they would say nothing.
_OPTIONAL = ("us exact", "us now", "step", "calls")


def render(report: Report, width: int) -> Iterator[Any]:
    """Headline, remarks, one line a layer, the layers left alone with their reasons, and what
    happened while running, equal events once.
    """
    yield Text(report.headline(), style="bold")
    for remark in report.remarks():
        yield Text(remark, style="yellow")
    if report.layers:
        yield _layers(report.layers, width)
    if report.left:
        yield _left(report)
    yield from _events(report.layers)
    attention = report.attention()
    if attention is not None:
        yield Text(attention.sentence(), style="bold")
    if report.pictures is not None:
        yield Text(report.pictures.sentence(), style="bold")


def render_text(report: Report, width: int = 120) -> str:
    """The same as plain text of a fixed width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(report)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _layers(rows: Sequence[LayerRow], width: int) -> Table:
    """One line a layer: numbers always whole, names and kernels folded where they must be, the
    least needed columns left out where there is no room, the reasons where there is some.
    """
    columns = [column for column in map(_Column.of, *_cells(rows)) if not column.empty]
    longest = max(len("layer"), *(len(row.name) for row in rows))
    kernels = [f"{row.variant} by step" if row.ranges else row.variant for row in rows]
    kernel = max(len("kernel"), *map(len, kernels))
    shared = ""
    if _room(columns, width) < longest + kernel:
        # What all names begin with goes into the title.
        shared = shared_path([row.name for row in rows])
        longest -= len(shared)
    for title in ("step", "head", "kind"):
        if _room(columns, width) < longest + kernel:
            columns = [column for column in columns if column.title != title]
    room = max(2 * _NARROWEST, _room(columns, width))
    kernel = min(kernel, max(_NARROWEST, room // 2))
    named = min(longest, room - kernel)
    reasons = room - named - kernel - _PADDING

    table = Table(box=None, pad_edge=False, padding=(0, _PADDING, 0, 0), header_style="dim")
    title = f"layer of {shared[:-1]}" if shared else "layer"
    table.add_column(Text(title, overflow="fold"), overflow="fold", width=named)
    if kinds := [column for column in columns if column.title == "kind"]:
        table.add_column("kind", no_wrap=True, width=kinds[0].width)
    table.add_column("kernel", overflow="fold", width=kernel)
    numbers = [column for column in columns if column.title != "kind"]
    for column in numbers:
        table.add_column(column.title, justify="right", no_wrap=True, width=column.width)
    if reasons >= _NARROWEST:
        table.add_column("why", overflow="ellipsis", no_wrap=True, width=reasons)
    for place, row in enumerate(rows):
        cells: list[Any] = [Text(row.name.removeprefix(shared))]
        cells += [Text(column.cells[place]) for column in kinds]
        cells.append(Text(kernels[place], style=_COLOURS[row.tier]))
        cells += [Text(column.cells[place]) for column in numbers]
        if reasons >= _NARROWEST:
            cells.append(Text(_why(row)))
        table.add_row(*cells)
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cells: tuple[str, ...]

    @classmethod
    def of(cls, title: str, cells: Sequence[str]) -> _Column:
        return cls(title, tuple(cells))

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    @property
    def empty(self) -> bool:
        """A column of times where nothing was timed, of steps where there is no schedule, of calls
        where none has run.
        """
        return self.title in _OPTIONAL and all(cell in ("-", "0/0") for cell in self.cells)


def _cells(rows: Sequence[LayerRow]) -> tuple[list[str], list[list[str]]]:
    columns = {
        "kind": [row.kind for row in rows],
        "cosine": [_number(row.cosine, ".5f") for row in rows],
        "rel L1": [_number(row.rel_l1, ".4f") for row in rows],
        "head": ["-" if row.worst_head is None else str(row.worst_head) for row in rows],
        "step": ["-" if row.worst_step is None else str(row.worst_step) for row in rows],
        "us exact": [_number(row.us_exact, ".0f") for row in rows],
        "us now": [_number(row.us_chosen, ".0f") for row in rows],
        "calls": [f"{row.quantised_calls}/{row.calls}" for row in rows],
    }
    return list(columns), list(columns.values())


def _room(columns: Sequence[_Column], width: int) -> int:
    """What is left of a line for a layer's name and its kernel."""
    return width - sum(column.width + _PADDING for column in columns) - _PADDING


def _left(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("left alone", overflow="fold")
    table.add_column("why", overflow="fold")
    for reason, names in grouped((layer.name, layer.reason) for layer in report.left):
        table.add_row(Text(_listed(names)), Text(reason))
    return table


def _events(rows: Sequence[LayerRow]) -> Iterator[Text]:
    for row in rows:
        if row.replaced_by is not None:
            yield Text(f"{row.name}: {_why(row)}", style="red")
    calls: dict[str, int] = {}
    for row in rows:
        for reason, count in row.fallbacks.items():
            calls[reason] = calls.get(reason, 0) + count
    fell_back = grouped((row.name, reason) for row in rows for reason in row.fallbacks)
    for reason, names in fell_back:
        text = f"{_listed(names)}: {counted(calls[reason], 'call')} ran exact ({reason})"
        yield Text(text, style="dim")
    ranged = [(row.name, worded(row.variant, row.ranges)) for row in rows if row.ranges]
    for runs, names in grouped(ranged):
        yield Text(f"{_listed(names)}, over the schedule: {runs}")
    tried = [(row.name, row.remedy) for row in rows if row.remedy is not None]
    for remedy, names in grouped(tried):
        yield Text(f"{_listed(names)}: {remedy}", style="dim")
    for note, names in grouped((row.name, note) for row in rows for note in row.notes):
        yield Text(f"{_listed(names)}: {note}", style="yellow")


def _listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more layers"


def shared_path(names: Sequence[str]) -> str:
    """The module path that all names begin with, its last dot included; "" where there is none."""
    if len(names) < 2:
        return ""
    # What the first and the last in order share, all share.
    pairs = zip(*(name.split(".")[:-1] for name in (min(names), max(names))), strict=False)
    parts = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "".join(f"{part}." for part in parts)


def _why(row: LayerRow) -> str:
    if row.replaced_by is not None:
        return f"no longer patched: replaced by {row.replaced_by}"
    # Cosine, head and step have columns of their own.
    told, ended, rest = row.reason.partition("), ")
    if ended and row.cosine is not None and told.startswith(f"cosine {row.cosine:.5f} in the"):
        return rest
    return row.reason


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
