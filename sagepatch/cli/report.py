"""`sagepatch report`: show a report that was saved as JSON, or turn it into a page or a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from sagepatch.cli.console import out, table, tell
from sagepatch.cli.saving import check_apart, check_report, write_report
from sagepatch.errors import InvalidArgument
from sagepatch.plan import Plan
from sagepatch.report.differences import Difference, differences, worded
from sagepatch.report.model import LayerRow
from sagepatch.report.render_json import load


def report(
    saved: Annotated[Path, typer.Argument(help="What `sagepatch run --report x.json` wrote.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", "--to", help="Write it as .html, .png or .json instead.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Everything about one layer.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="A plan of the same model: what it runs differently."),
    ] = None,
) -> None:
    """Show a saved report, or write it in another format."""
    if out_file is not None:
        check_report(out_file, "--out")
        check_apart({"--against": against, "--out": out_file})
    made = load(saved)
    if against is not None:
        made = made.with_plan(against.name, Plan.load(against))
    if out_file is not None:
        write_report(made, out_file)
        tell(f"{out_file}", style="bold")
        return
    if layer is None:
        out().print(made)
        for name, plan in made.plans:
            show_differences(name, differences(made.layers, plan), len(made.layers))
        return
    row = next((row for row in made.layers if row.name == layer), None)
    if row is None:
        names = ", ".join(row.name for row in made.layers[:4])
        raise InvalidArgument(f"the report has no layer {layer!r}; it has {names} ...")
    show_layer(row)


def show_layer(row: LayerRow) -> None:
    """Everything about one layer, a line each."""
    from rich.text import Text

    shown = table("field", "value")
    for one in fields(row):
        shown.add_row(one.name, Text(_shown(one.name, getattr(row, one.name))))
    out().print(shown)


def _shown(name: str, value: Any) -> str:
    """A field of a layer as the report's table shows such a value, "-" for none."""
    if value is None or value in ("", (), {}):
        return "-"
    if name == "ranges":
        return worded("", value)
    if isinstance(value, dict):
        return ", ".join(f"{count} {what}" for what, count in value.items())
    if isinstance(value, tuple):
        return "; ".join(value)
    if isinstance(value, float):
        return f"{value:{_DIGITS.get(name, '.4f')}}"
    return str(value)


_DIGITS = {
    "cosine": ".5f",
    "cosine_mean": ".5f",
    "us_exact": ".0f",
    "us_chosen": ".0f",
    "rmse": ".3g",
    "max_abs_v": ".3g",
    "k_offset": ".3g",
    "q_outlier": ".3g",
}


def show_differences(name: str, found: Sequence[Difference], layers: int) -> None:
    """The layers that another plan runs differently, as a table."""
    if not found:
        tell(f"{name} runs the same in all {layers} layers", style="bold")
        return
    from rich.text import Text

    tell(f"{name} runs {len(found)} of {layers} layers differently:", style="bold")
    timed = any(one.us_here is not None or one.us_there is not None for one in found)
    titles = ["layer", "here", "there", "cosine here", "there"]
    made = table(*titles, *(["us here", "there"] if timed else []))
    for one in found:
        cells = [one.name, one.here, one.there, *map(_cosine, (one.cosine_here, one.cosine_there))]
        if timed:
            cells += map(_us, (one.us_here, one.us_there))
        made.add_row(*(Text(cell) for cell in cells))
    out().print(made)


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
