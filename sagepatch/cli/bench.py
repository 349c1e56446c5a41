"""`sagepatch bench`: this machine's kernels against exact attention, in two minutes, as a table or
JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from sagepatch import bench as benchmark
from sagepatch.cli.console import err, hint, out
from sagepatch.cli.loading import pick_device
from sagepatch.cli.options import Device
from sagepatch.env import Machine
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import RECIPES


def bench(
    device: Device = "auto",
    recipe: Annotated[list[str] | None, typer.Option(help="Only this recipe; may repeat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A file that you can send us.")] = False,
) -> None:
    """Time every kernel that serves this GPU; without one, show the emulated kernels' errors."""
    unknown = [name for name in recipe or () if name not in RECIPES]
    if unknown:
        raise InvalidArgument(f"no recipe {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    where = pick_device(device)
    on_cpu = where == "cpu"
    if on_cpu:
        hint("no GPU: emulated kernels only; these are errors, a speed here would say nothing")
    shapes = benchmark.CPU_SHAPES if on_cpu else benchmark.GPU_SHAPES
    with err().status("measuring"):
        rows = benchmark.bench(shapes, where, recipe or ())
    if as_json:
        said = {"machine": Machine.here().to_dict(), "rows": [asdict(row) for row in rows]}
        print(json.dumps(said, indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("shape", "kernel", "ms", "p20", "p80", "cosine", "rel L1"):
        table.add_column(column)
    for row in rows:
        times = (row.ms_median, row.ms_p20, row.ms_p80)
        shown = ["-" if time is None else f"{time:.3f}" for time in times]
        table.add_row(row.shape, row.variant, *shown, f"{row.cosine:.5f}", f"{row.rel_l1:.4f}")
    out().print(table)
