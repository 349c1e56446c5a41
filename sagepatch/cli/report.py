"""`sagepatch report`: show a saved JSON report, or turn it into a page or a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagepatch.cli.console import out
from sagepatch.errors import InvalidArgument
from sagepatch.report.render_json import load


def report(
    path: Annotated[Path, typer.Argument(help="A report that `run --report x.json` wrote.")],
    to: Annotated[Path | None, typer.Option(help="Write it as .html or .png instead.")] = None,
    layer: Annotated[str | None, typer.Option(help="Show one layer only.")] = None,
) -> None:
    """Show the report at PATH, or convert it."""
    said = load(path)
    if layer is not None:
        rows = [row for row in said.layers if row.name == layer]
        if not rows:
            names = ", ".join(row.name for row in said.layers[:5])
            raise InvalidArgument(f"the report has no layer {layer!r}; it has {names} ...")
        for name in type(rows[0]).__slots__:
            out().print(f"{name}: {getattr(rows[0], name)}", highlight=False, markup=False)
    elif to is None:
        out().print(said)
    elif to.suffix == ".html":
        said.to_html(to)
        out().print(f"wrote {to}", highlight=False)
    elif to.suffix == ".png":
        said.plot(to)
        out().print(f"wrote {to}", highlight=False)
    else:
        raise InvalidArgument(f"--to {to} must end in .html or .png")
