"""`sagepatch inspect`: what would be patched in a model and what not, from its configs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sagepatch.cli.console import err, out
from sagepatch.cli.loading import skeleton
from sagepatch.cli.options import Model
from sagepatch.errors import NothingPatched
from sagepatch.patchers.model import parts_of, search


def inspect(
    model: Model,
    component: Annotated[
        list[str] | None, typer.Option(help="A part to look at instead of the denoisers.")
    ] = None,
) -> None:
    """List MODEL's attention layers: what would be patched, what not and why. Loads no weights."""
    components: Sequence[str] | None = component or None
    with err().status(f"reading the configs of {model}"):
        parts = parts_of(skeleton(model), components)
        found = search(parts)
    total = len(found.sites) + len(found.left)
    out().print(
        f"{parts.label}: {total} attention layers, {len(found.sites)} would be patched",
        style="bold",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("layer", "kind", "reached by", "left alone because"):
        table.add_column(column, overflow="fold")
    for site in found.sites:
        table.add_row(Text(site.name), site.kind, f"{site.patcher} patcher", "")
    for layer in found.left:
        table.add_row(Text(layer.name), layer.kind, "", Text(layer.reason))
    out().print(table)
    if not found.sites:
        raise NothingPatched(f"nothing in {parts.label} can be patched")
