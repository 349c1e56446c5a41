"""`sagepatch report`: show a report that was saved as JSON, or turn it into a page or a plot."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sagepatch.cli.console import out, table, tell
from sagepatch.cli.saving import check_report, write_report
from sagepatch.errors import InvalidArgument
from sagepatch.report.render_json import load


def report(
    saved: Annotated[Path, typer.Argument(help="What `sagepatch run --report x.json` wrote.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", "--to", help="Write it as .html, .png or .json instead.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Everything about one layer.")] = None,
) -> None:
    """Show a saved report, or write it in another format."""
    if out_file is not None:
        check_report(out_file)
    made = load(saved)
    if out_file is not None:
        write_report(made, out_file)
        tell(f"{out_file}", style="bold")
        return
    if layer is None:
        out().print(made)
        return
    rows = [row for row in made.layers if row.name == layer]
    if not rows:
        names = ", ".join(row.name for row in made.layers[:4])
        raise InvalidArgument(f"the report has no layer {layer!r}; it has {names} ...")
    from rich.text import Text

    shown = table("field", "value")
    for name, value in asdict(rows[0]).items():
        shown.add_row(name, Text(str(value)))
    out().print(shown)
