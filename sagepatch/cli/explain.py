"""`sagepatch explain`: one attention call put to every kernel, with all reasons against each."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sagepatch.backends import unusable
from sagepatch.cli.console import out
from sagepatch.dispatch import Request, candidates
from sagepatch.errors import InvalidArgument, VariantRefused
from sagepatch.spec import AttnSpec, MaskKind
from sagepatch.variant import Variant


def explain(
    shape: Annotated[
        str,
        typer.Argument(help="B,Hq,Hkv,Sq,Skv,D and perhaps Dv, as 1,24,24,4608,4608,128."),
    ],
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64.")] = "bf16",
    arch: Annotated[
        int | None, typer.Option(help="Compute capability, as 90; none: a CPU.")
    ] = None,
    mask: Annotated[str, typer.Option(help="none, key_padding, bool or additive.")] = "none",
    causal_offset: Annotated[int | None, typer.Option(help="Causal with this offset.")] = None,
    window: Annotated[int | None, typer.Option(help="Sliding window.")] = None,
    variant: Annotated[str, typer.Option(help="Ask for a tier, recipe or full name.")] = "auto",
    emulate: Annotated[bool, typer.Option(help="Admit emulated kernels.")] = False,
) -> None:
    """Say which kernels could serve a call and everything that speaks against the others."""
    spec = _spec(shape, dtype, arch, mask, causal_offset, window)
    request = Request(variant, emulate)
    decisions = candidates(spec, request, _unusable_for(arch))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("kernel", "tier", "serves", "why not"):
        table.add_column(column, overflow="fold")
    for decision in decisions:
        kernel = decision.variant
        ok = "no" if decision.reasons else "yes"
        table.add_row(kernel.name, kernel.tier, ok, Text("; ".join(decision.reasons)))
    out().print(f"{spec}", style="bold", highlight=False)
    out().print(table)
    if all(decision.reasons for decision in decisions):
        reasons = [f"{d.variant.name}: {', '.join(d.reasons)}" for d in decisions]
        raise VariantRefused(variant, reasons)


def _unusable_for(arch: int | None):  # type: ignore[no-untyped-def]
    # A question about another GPU is not about what is installed here.
    def answer(variant: Variant) -> str | None:
        return None if arch is not None else unusable(variant)

    return answer


def _spec(
    shape: str,
    dtype: str,
    arch: int | None,
    mask: str,
    causal_offset: int | None,
    window: int | None,
) -> AttnSpec:
    try:
        sizes = [int(part) for part in shape.split(",")]
        kind = MaskKind(mask)
    except ValueError as error:
        raise InvalidArgument(f"cannot read shape {shape!r} or mask {mask!r}: {error}") from error
    if len(sizes) not in (6, 7) or min(sizes) < 0:
        raise InvalidArgument(f"shape {shape!r} needs B,Hq,Hkv,Sq,Skv,D or ...,Dv, all positive")
    if dtype not in ("fp16", "bf16", "fp32", "fp64"):
        raise InvalidArgument(f"--dtype is {dtype!r}, needs fp16, bf16, fp32 or fp64")
    B, Hq, Hkv, Sq, Skv, D = sizes[:6]
    if Hkv == 0 or Hq % Hkv:
        raise InvalidArgument(f"{Hq} query heads cannot share {Hkv} key heads")
    return AttnSpec(
        B, Hq, Hkv, Sq, Skv, D, sizes[-1], dtype, dtype,
        "cpu" if arch is None else "cuda", arch, kind, causal_offset, window,
    )  # fmt: skip
