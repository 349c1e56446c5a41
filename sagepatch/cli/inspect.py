"""`sagepatch inspect`: what would be patched in a model and what not, from its configs alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from torch import nn

from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, progress, table, tell
from sagepatch.cli.skeleton import skeleton
from sagepatch.cli.sources import resolve
from sagepatch.errors import NothingPatched
from sagepatch.patchers.model import fingerprint, search


@dataclass(frozen=True, slots=True)
class Row:
    """One attention layer. `heads` and `head_dim` are None where the module does not say."""

    name: str
    kind: str
    patched_by: str | None
    heads: int | None
    head_dim: int | None
    reason: str


def inspect(
    model: o.Model,
    component: Annotated[
        list[str] | None, typer.Option(help="A part to look at instead of the denoisers; repeat.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """List the attention layers of a model: what would be patched, what not and why.

    Reads the configs only: no weights are loaded or fetched.
    """
    source = resolve(model)
    with progress(f"reading the configs of {model}"):
        parts = skeleton(source, component or None)
        found = search(parts)
    rows = [
        Row(site.name, site.kind, site.patcher, *heads_of(site.module), "") for site in found.sites
    ]
    rows += [Row(left.name, left.kind, None, None, None, left.reason) for left in found.left]
    if as_json:
        print_json(
            {
                "model": parts.label,
                "fingerprint": fingerprint(parts, found),
                "layers": [asdict(row) for row in rows],
            }
        )
    else:
        where = ", ".join(name for name in parts.modules if name)
        tell(
            f"{parts.label}{f' ({where})' if where else ''}: {len(rows)} attention layers, "
            f"{len(found.sites)} would be patched, {len(found.left)} left alone",
            style="bold",
        )
        show(rows)
    if not found.sites:
        raise NothingPatched(f"nothing in {parts.label} can be patched")


def show(rows: list[Row]) -> None:
    """The layers as a table."""
    from rich.text import Text

    made = table("layer", "kind", "heads", "reached by", "left alone because")
    for row in rows:
        heads = "" if row.heads is None else f"{row.heads} x {row.head_dim}"
        made.add_row(Text(row.name), row.kind, heads, row.patched_by or "", Text(row.reason))
    out().print(made)


def heads_of(module: nn.Module) -> tuple[int | None, int | None]:
    """Query heads and head size, from the names that attention modules use for them."""
    config = getattr(module, "config", None)
    heads = _first_int(module, "heads", "num_heads", "n_heads", "num_attention_heads")
    heads = heads or _first_int(config, "num_attention_heads")
    size = _first_int(module, "head_dim", "dim_head", "attention_head_dim", "attention_head_size")
    inner = _first_int(module, "inner_dim", "embed_dim", "all_head_size")
    if size is None and heads and inner:
        size = inner // heads
    return (heads, size) if heads and size else (None, None)


def _first_int(owner: object, *names: str) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
