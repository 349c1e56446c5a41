"""`sagepatch info`: this machine, its kernels and what is missing, for people and bug reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import sagepatch
from sagepatch.backends import unusable
from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.backends.selfcheck import last_failure
from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, table, tell
from sagepatch.env import Machine
from sagepatch.variant import Variant

_NAMED = 2


def info(
    every: Annotated[
        bool, typer.Option("--all", help="A row for each kernel, not one for each state.")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show versions, GPUs, the kernels' states here, and a sentence for each thing missing."""
    machine = Machine.here()
    kernels = [
        {
            "name": variant.name,
            "tier": variant.tier,
            "state": state(variant, machine),
            "archs": None if variant.archs is None else sorted(variant.archs),
            "ran_on": sorted(variant.ran_on),
        }
        for variant in CATALOGUE
    ]
    if as_json:
        version = sagepatch.__version__
        print_json({"sagepatch": version, "machine": machine.to_dict(), "kernels": kernels})
    else:
        show(machine, kernels, every)


def show(machine: Machine, kernels: list[dict[str, Any]], every: bool) -> None:
    """The same for people."""
    from rich.text import Text

    tell(
        f"sagepatch {sagepatch.__version__} on {machine.system}, Python {machine.python}",
        style="bold",
    )
    others = {name: found for name, found in machine.versions.items() if name != "sagepatch"}
    tell(", ".join(f"{name} {found or 'absent'}" for name, found in others.items()))
    for gpu in machine.gpus:
        tell(f"{gpu.name}, sm_{gpu.arch}, {gpu.memory_bytes / 2**30:.0f} GiB")
    for problem in machine.problems:
        tell(f"- {problem}", style="yellow")
    if every:
        made = table("kernel", "tier", "state here")
        for kernel in kernels:
            made.add_row(kernel["name"], kernel["tier"], Text(kernel["state"]))
        out().print(made)
        return
    made = table("kernels", "state here")
    alike: dict[str, list[str]] = {}
    for kernel in kernels:
        alike.setdefault(kernel["state"], []).append(kernel["name"])
    for said, names in alike.items():
        made.add_row(counted(names), Text(said))
    out().print(made)
    tell(f"`sagepatch info --all` lists each of the {len(kernels)} kernels.")


def counted(names: Sequence[str]) -> str:
    """Kernels by name where they are few, else how many of each toolchain."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    found = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{count} {toolchain}" for toolchain, count in found.items())


def state(variant: Variant, machine: Machine) -> str:
    """What can be said of a kernel on this machine, in one sentence."""
    if variant.toolchain == "emulated":
        return "ready on request (--emulate, or by its full name): accuracy, not speed"
    if "cpu" in variant.devices:
        return "ready"
    if not machine.gpus:
        return "no GPU here"
    arch = machine.gpus[0].arch
    if variant.archs is not None and arch not in variant.archs:
        served = ", ".join(f"sm_{known}" for known in sorted(variant.archs))
        return f"not for sm_{arch}: made for {served}"
    why_not = unusable(variant)
    if why_not is not None:
        return why_not
    if (failed := last_failure(variant)) is not None:
        return f"disabled: {failed}"
    if variant.withheld is not None:
        return f"withheld, by full name only: {variant.withheld}"
    said = (variant.untried(arch) or "ready", _tiles(variant, arch), variant.note)
    return "; ".join(part for part in said if part)


def _tiles(variant: Variant, arch: int) -> str | None:
    """What has to be said of the tiles of a Triton kernel where nobody measured them."""
    if variant.toolchain != "triton":
        return None
    from sagepatch.backends.triton.tiles import is_tuned

    return None if is_tuned(arch) else f"tiles not tuned for sm_{arch}: a default that fits"
