"""`sagepatch bench`: this machine's kernels beside exact attention, as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from sagepatch import bench as benchmark
from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, progress, say, table, tell
from sagepatch.cli.loading import Placement
from sagepatch.cli.saving import check_target
from sagepatch.env import Machine
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import RECIPES
from sagepatch.plan import write_text


def bench(
    shape: Annotated[
        list[str] | None, typer.Option(help="Only this shape, by name; repeat for more.")
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Only this recipe; repeat.")] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write a .csv file.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Time every kernel that serves this GPU, whole calls, warm, with spread.

    Without a GPU: the errors of the emulated kernels, and no times.
    """
    unknown = [name for name in recipe or () if name not in RECIPES]
    if unknown:
        raise InvalidArgument(f"no recipe {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    odd = [name for name in shape or () if name not in benchmark.SHAPES]
    if odd:
        raise InvalidArgument(f"no shape {', '.join(odd)}; there are {', '.join(benchmark.SHAPES)}")
    if out_file is not None:
        check_target(out_file, (".csv",), "--out")
    where = Placement.of(device, dtype, "none")
    on_cpu = where.device.type == "cpu"
    if on_cpu:
        say(
            "No GPU: emulated kernels only. These are their errors; "
            "the time of an emulation would say nothing.",
            style="yellow",
        )
    usual = benchmark.CPU_SHAPES if on_cpu else benchmark.GPU_SHAPES
    shapes = [benchmark.SHAPES[name] for name in shape] if shape else usual
    rows = []
    with progress("measuring") as step:
        for row in benchmark.bench(shapes, where.device, where.dtype, recipe or ()):
            rows.append(row)
            step(len({r.shape for r in rows}) - 1, len(shapes))
    machine = Machine.here()
    if out_file is not None:
        write_text(out_file, csv_text(rows, machine))
    if as_json:
        print_json({"machine": machine.to_dict(), "rows": [asdict(row) for row in rows]})
        return
    show(rows, timed=not on_cpu)
    if out_file is not None:
        tell(f"{out_file}", style="bold")


def show(rows: list[benchmark.Row], *, timed: bool) -> None:
    """The rows as a table; columns of times only where there are times."""
    from rich.text import Text

    times = ("ms", "p20", "p80", "TFLOPS", "x exact") if timed else ()
    made = table("shape", "kernel", *times, "cosine", "rel L1", "fault")
    for row in rows:
        cells = [row.shape, row.variant]
        if timed:
            numbers = (row.ms_median, row.ms_p20, row.ms_p80, row.tflops, row.speedup)
            forms = (".3f", ".3f", ".3f", ".0f", ".2f")
            pairs = zip(numbers, forms, strict=True)
            cells += ["-" if number is None else format(number, form) for number, form in pairs]
        cells += [f"{row.cosine:.5f}", f"{row.rel_l1:.4f}"]
        made.add_row(*cells, Text(row.fault or "", style="red"))
    out().print(made)


def csv_text(rows: list[benchmark.Row], machine: Machine) -> str:
    """CSV with the machine in comment lines above, so that the file speaks for itself."""
    buffer = io.StringIO()
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items() if found)
    buffer.write(f"# {machine.gpu_name}, {versions}, CUDA {machine.cuda}\n")
    writer = csv.writer(buffer, lineterminator="\n")
    names = [field.name for field in fields(benchmark.Row)]
    writer.writerow(names)
    for row in rows:
        values = asdict(row)
        writer.writerow(["" if values[name] is None else values[name] for name in names])
    return buffer.getvalue()
