"""`sagepatch bench`: this machine's kernels beside exact attention, as a table or as a file."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.bench import document
from sagepatch.bench.check import Check
from sagepatch.bench.collect import SECONDS, Results, collect, usual_shapes
from sagepatch.bench.measure import Row
from sagepatch.bench.shapes import SHAPES
from sagepatch.cli import options as o
from sagepatch.cli.console import out, progress, say, table, tell
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
    recipe: Annotated[
        list[str] | None, typer.Option(help="Only this recipe, or kernel by full name; repeat.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long it may take; what is left out is named.")
    ] = SECONDS,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Also write a .json or .csv file.")
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Check every kernel that serves this GPU and time it beside torch's attention, in two minutes.

    Whole calls, warm, in turns, with spread. --json prints the file that docs/send-us-numbers.md
    asks for. Without a GPU: the errors of the emulated kernels, and no times.
    """
    unknown = [name for name in recipe or () if name not in RECIPES and name not in BY_NAME]
    if unknown:
        raise InvalidArgument(
            f"no recipe or kernel {', '.join(unknown)}; there are {', '.join(RECIPES)}"
        )
    odd = [name for name in shape or () if name not in SHAPES]
    if odd:
        raise InvalidArgument(f"no shape {', '.join(odd)}; there are {', '.join(SHAPES)}")
    o.check_bound("--seconds", seconds, 1)
    if out_file is not None:
        check_target(out_file, (".json", ".csv"), "--out")
    where = Placement.of(device, dtype, "none")
    on_cpu = where.device.type == "cpu"
    if on_cpu:
        say(
            "No GPU: emulated kernels only. These are their errors; "
            "the time of an emulation would say nothing.",
            style="yellow",
        )
    shapes = [SHAPES[name] for name in shape] if shape else usual_shapes(where.device)
    with progress("measuring") as step:
        results = collect(
            shapes, where.device, where.dtype, recipe or (), seconds=seconds, step=step
        )
    machine = Machine.here()
    made = document.document(results, machine, where.device)
    if out_file is not None:
        as_csv = out_file.suffix.lower() == ".csv"
        write_text(out_file, csv_text(results.rows, machine) if as_csv else document.text(made))
    if as_json:
        sys.stdout.write(document.text(made))
        return
    show(results, timed=not on_cpu)
    if out_file is not None:
        tell(f"{out_file}", style="bold")


def show(results: Results, *, timed: bool) -> None:
    """The results as tables; columns of times only where there are times."""
    failed = [check for check in results.checks if check.state != "passed"]
    if failed:
        show_checks(failed)
    show_rows(results.rows, timed=timed)
    for one in results.measured:
        if one.left_out:
            tell(f"{one.shape.name}: {one.left_out}", style="yellow")


def show_checks(checks: list[Check]) -> None:
    """Kernels that will not be timed, and why."""
    from rich.text import Text

    made = table("kernel", "known answer", "why")
    for check in checks:
        made.add_row(check.kernel, check.state, Text(check.why or ""))
    out().print(made)


def show_rows(rows: list[Row], *, timed: bool) -> None:
    """The rows as one table."""
    from rich.text import Text

    times = ("ms", "p20", "p80", "TFLOPS", "x exact") if timed else ()
    made = table("shape", "kernel", *times, "cosine", "rel L1", "fault")
    for row in rows:
        cells = [row.shape, row.variant]
        if timed:
            numbers = (row.ms_median, row.ms_p20, row.ms_p80, row.tflops, row.speedup)
            forms = (".3f", ".3f", ".3f", ".0f", ".2f")
            cells += [_cell(n, form) for n, form in zip(numbers, forms, strict=True)]
        cells += [_cell(row.cosine, ".5f"), _cell(row.rel_l1, ".4f")]
        made.add_row(*cells, Text(row.fault or "", style="red"))
    out().print(made)


def csv_text(rows: list[Row], machine: Machine) -> str:
    """CSV with the machine in comment lines above, so that the file speaks for itself."""
    buffer = io.StringIO()
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items() if found)
    buffer.write(f"# {machine.gpu_name}, {versions}, CUDA {machine.cuda}\n")
    writer = csv.writer(buffer, lineterminator="\n")
    names = [field.name for field in fields(Row)]
    writer.writerow(names)
    for row in rows:
        values = asdict(row)
        writer.writerow(["" if values[name] is None else values[name] for name in names])
    return buffer.getvalue()


def _cell(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)
