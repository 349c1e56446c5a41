"""`sagepatch info`: this machine, its kernels and what is missing, for people and bug reports."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import sagepatch
from sagepatch.backends import unusable
from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.cli.console import out
from sagepatch.env import Machine
from sagepatch.variant import Variant


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable, for bug reports.")
    ] = False,
) -> None:
    """Show versions, GPUs, every kernel's state here, and one sentence for each thing missing."""
    machine = Machine.here()
    kernels = [_kernel(variant, machine) for variant in CATALOGUE]
    if as_json:
        said = {
            "sagepatch": sagepatch.__version__,
            "machine": machine.to_dict(),
            "kernels": kernels,
        }
        print(json.dumps(said, indent=1))
        return
    versions = ", ".join(f"{name} {found or 'absent'}" for name, found in machine.versions.items())
    out().print(f"sagepatch {sagepatch.__version__} on {machine.system}, Python {machine.python}")
    out().print(versions, highlight=False)
    for gpu in machine.gpus:
        memory = gpu.memory_bytes / 2**30
        out().print(f"GPU {gpu.name}, sm_{gpu.arch}, {memory:.0f} GiB", highlight=False)
    for problem in machine.problems:
        out().print(problem, style="yellow", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("kernel", "tier", "state here"):
        table.add_column(column, overflow="fold")
    for kernel in kernels:
        table.add_row(kernel["name"], kernel["tier"], Text(kernel["state"]))
    out().print(table)


def _kernel(variant: Variant, machine: Machine) -> dict[str, Any]:
    return {
        "name": variant.name,
        "tier": variant.tier,
        "state": _state(variant, machine),
        "archs": sorted(variant.archs or ()),
        "ran_on": sorted(variant.ran_on),
    }


def _state(variant: Variant, machine: Machine) -> str:
    if variant.toolchain == "emulated":
        return "ready, with emulate=True or by full name: accuracy, not speed"
    if variant.devices != frozenset({"cuda"}):
        return "ready"
    if not machine.gpus:
        return "no GPU here"
    arch = machine.gpus[0].arch
    if variant.archs is not None and arch not in variant.archs:
        listed = ", ".join(f"sm_{known}" for known in sorted(variant.archs))
        return f"not for sm_{arch}; made for {listed}"
    broken = unusable(variant)
    if broken is not None:
        return broken
    if arch not in variant.ran_on:
        return f"compiled for sm_{arch}, not yet run there by us: the self-check decides"
    return "ready"
