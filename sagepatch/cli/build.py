"""`sagepatch build`: compile the CUDA kernels ahead of their first use; needs no GPU."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated, Any

import typer

from sagepatch.backends.catalogue import CUDA, CUDA_MMA
from sagepatch.backends.cuda.build import TARGETS, Compiled, Program
from sagepatch.backends.cuda.build import missing as missing_compiler
from sagepatch.backends.cuda.cache import kept
from sagepatch.backends.cuda.instances import of_recipe as hopper_programs
from sagepatch.backends.cuda_mma.instances import of_recipe as mma_programs
from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, progress, table, tell
from sagepatch.env import Machine, cache_dir
from sagepatch.errors import MachineError


def build(
    all_archs: Annotated[
        bool,
        typer.Option("--all-archs", help="For every GPU that has such kernels, not only mine."),
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Compile the CUDA kernels for common head sizes and keep them in the cache directory.

    Without it each is compiled when a call first wants it. Exit code 3 where nothing can be
    compiled.
    """
    # The bar says it; a line for each program would only tear it.
    logging.getLogger("sagepatch.compile").setLevel(logging.WARNING)
    where = cache_dir()
    wanted = programs(targets(all_archs))
    with progress(f"compiling {len(wanted)} programs") as step:
        made = compile_all(list(wanted), step)
    rows = [row for program, compiled in made for row in facts(program, compiled, wanted[program])]
    if as_json:
        print_json(
            {"kernels": rows, "directory": None if where is None else str(where / "kernels")}
        )
    else:
        show(rows)
        if where is None:
            tell("Nothing is kept: SAGEPATCH_CACHE_DIR is set to nothing.", style="yellow")
        else:
            tell(f"{len(wanted)} programs in {where / 'kernels'}", style="bold")


def targets(all_archs: bool) -> list[str]:
    """What to compile for: every target, or those of the GPUs here."""
    if all_archs:
        wanted = list(TARGETS.values())
    else:
        here = Machine.here().gpus
        wanted = list(dict.fromkeys(TARGETS[g.arch] for g in here if g.arch in TARGETS))
        if not wanted:
            found = ", ".join(f"{g.name} (sm_{g.arch})" for g in here) or "no GPU"
            raise MachineError(
                f"the CUDA kernels are for {', '.join(TARGETS.values())}; found {found}: "
                "--all-archs compiles them for another machine"
            )
    for target in wanted:
        why = missing_compiler(target)
        if why is not None:
            raise MachineError(why)
    return wanted


def programs(wanted: list[str]) -> dict[Program, list[str]]:
    """What is compiled for these targets, and the full names of the variants that run it."""
    found: dict[Program, list[str]] = {}
    for target in wanted:
        for variants, of_recipe in ((CUDA, hopper_programs), (CUDA_MMA, mma_programs)):
            for variant in variants:
                for program in of_recipe(variant.recipe, target):
                    found.setdefault(program, []).append(variant.name)
    return found


def compile_all(programs: list[Program], step: Any) -> list[tuple[Program, Compiled]]:
    """Each program compiled or read from the cache, in the order given."""
    found: dict[Program, Compiled] = {}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        running = {pool.submit(kept, program): program for program in programs}
        for done, future in enumerate(as_completed(running), 1):
            found[running[future]] = future.result()
            step(done, len(programs))
    return [(program, found[program]) for program in programs]


def facts(program: Program, compiled: Compiled, variants: list[str]) -> list[dict[str, Any]]:
    """One row a kernel, as read from its machine code. `spill_bytes` is all the memory of a thread
    outside its registers; `shared_bytes` has what a launch adds.
    """
    added = int(dict(program.defines).get("SHARED_BYTES", 0))
    return [
        {
            "kernel": found.kernel,
            "arch": program.target,
            "registers": found.registers,
            "spill_bytes": found.stack_bytes,
            "shared_bytes": found.shared_bytes + added,
            "variants": variants,
            "source": program.source,
            "options": dict(program.defines),
        }
        for found in compiled.resources
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """The same for people."""
    made = table("kernel", "arch", "registers", "spilled", "shared", "variants", "options")
    for row in rows:
        made.add_row(
            row["kernel"],
            row["arch"],
            str(row["registers"]),
            str(row["spill_bytes"]),
            str(row["shared_bytes"]),
            " ".join(row["variants"]),
            " ".join(f"{name}={value}" for name, value in row["options"].items()),
        )
    out().print(made)
