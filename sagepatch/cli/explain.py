"""`sagepatch explain`: one attention call put to every kernel, with all reasons against each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from sagepatch.backends import unusable
from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.cli import options as o
from sagepatch.cli.console import out, print_json, say, table, tell
from sagepatch.dispatch import Decision, Request, Unusable, candidates, select
from sagepatch.env import Machine
from sagepatch.errors import InvalidArgument, VariantRefused
from sagepatch.spec import DTYPE_NAMES, AttnSpec, MaskKind


def explain(
    shape: Annotated[
        str,
        typer.Argument(
            help="batch x heads x queries x keys x head_dim, as reports show it: "
            "1x24x4608x4608x128; 32/8 heads for GQA, 192/128 where v's heads differ."
        ),
    ],
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or fp64.")] = "bf16",
    arch: Annotated[
        int | None,
        typer.Option(
            min=0, help="Compute capability, 90 for sm_90; 0 for a CPU. Default: this machine."
        ),
    ] = None,
    mask: Annotated[str, typer.Option(help="none, key_padding, bool or additive.")] = "none",
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    causal_offset: Annotated[
        int | None, typer.Option(help="With --causal: keys - queries. Default 0.")
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window.")] = None,
    softcap: Annotated[bool, typer.Option("--softcap", help="Scores through a tanh.")] = False,
    sinks: Annotated[
        bool, typer.Option("--sinks", help="A score of each head's own that no key has.")
    ] = False,
    packed: Annotated[bool, typer.Option("--packed", help="Several sequences in one.")] = False,
    variant: Annotated[
        str, typer.Option(help="Look only at a tier, a recipe or a full name.")
    ] = "auto",
    emulate: Annotated[bool, typer.Option("--emulate", help="Admit emulated kernels.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Say which kernel would serve a call, and every reason against each of the others.

    Works for any GPU from any machine. Exit code 4 where nothing that was asked for can serve.
    """
    if causal_offset is not None and not causal:
        raise InvalidArgument(f"--causal-offset {causal_offset} needs --causal")
    for name, value in (("--causal-offset", causal_offset), ("--window", window)):
        if value is not None and abs(value) >= 1 << 63:
            raise InvalidArgument(f"{name} {value} must be a whole number of 64 bits")
    here = Machine.here()
    own = here.gpus[0].arch if here.gpus else 0
    target = own if arch is None else arch
    spec = read_spec(shape, dtype, target, mask)
    if packed and (spec.batch != 1 or spec.mask is not MaskKind.NONE):
        raise InvalidArgument(
            "a packed call has batch 1 and no mask: its members are separated by their lengths"
        )
    spec = AttnSpec(
        **{
            **asdict(spec),
            "mask": spec.mask,
            "causal_offset": (causal_offset or 0) if causal else None,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "packed": packed,
        }
    )
    request = Request(variant, emulate)
    # What is installed here says nothing about another machine.
    usable: Unusable = unusable if target == own else (lambda variant: None)
    decisions = candidates(spec, request, usable, CATALOGUE)
    if as_json:
        print_json(
            {
                "spec": asdict(spec),
                "kernels": [
                    {
                        "name": d.variant.name,
                        "tier": d.variant.tier,
                        "serves": not d.reasons,
                        "reasons": list(d.reasons),
                    }
                    for d in decisions
                ],
            }
        )
    else:
        tell(f"{spec} on {f'sm_{target}' if target else 'a CPU'}", style="bold")
        show(decisions)
    try:
        chosen = select(spec, request, usable, CATALOGUE)
    except VariantRefused as refused:
        if len(decisions) == 1:
            raise
        told = f"none of its {len(decisions)} kernels does, each for its reasons above"
        raise VariantRefused(variant, refused.reasons, told) from None
    if not as_json:
        why = unserved(target, decisions) or next(
            (d.reasons[0] for d in chosen.decisions if d.reasons), ""
        )
        stays = f" ({why})" if chosen.variant.recipe.exact and variant == "auto" and why else ""
        tell(f"An uncalibrated call runs {chosen.variant.name}{stays}.", style="bold")
        if not target and arch is None:
            say("There is no GPU here: --arch 90 asks for one, of sm_90.")


def unserved(arch: int, decisions: tuple[Decision, ...]) -> str | None:
    """That no kernel at all is made for a GPU, None where one is, or without a GPU."""
    made = {one for decision in decisions for one in decision.variant.archs or ()}
    if not arch or arch in made or not made:
        return None
    return f"no kernel is made for sm_{arch}, only for {', '.join(f'sm_{m}' for m in sorted(made))}"


def show(decisions: tuple[Decision, ...]) -> None:
    """Every kernel and what speaks against it."""
    from rich.text import Text

    made = table("kernel", "tier", "serves", "why not")
    for decision in decisions:
        kernel = decision.variant
        serves = Text("no", style="dim") if decision.reasons else Text("yes", style="green")
        made.add_row(kernel.name, kernel.tier, serves, Text("; ".join(decision.reasons)))
    out().print(made)


def read_spec(shape: str, dtype: str, arch: int, mask: str) -> AttnSpec:
    """The spec of a shape as reports print it; refuses what is no attention call."""
    if dtype not in DTYPE_NAMES.values():
        raise InvalidArgument(f"--dtype is {dtype!r}, needs {', '.join(DTYPE_NAMES.values())}")
    if mask not in [kind.value for kind in MaskKind]:
        kinds = ", ".join(kind.value for kind in MaskKind)
        raise InvalidArgument(f"--mask is {mask!r}, needs one of {kinds}")
    try:
        fields = [[int(part) for part in field.split("/")] for field in shape.lower().split("x")]
    except ValueError as error:
        raise InvalidArgument(f"shape {shape!r} cannot be read: as 1x24x4608x4608x128") from error
    if len(fields) != 5 or any(len(f) > 1 for i, f in enumerate(fields) if i not in (1, 4)):
        raise InvalidArgument(f"shape {shape!r} needs five sizes, as 1x24x4608x4608x128")
    (batch,), heads, (queries,), (keys,), dims = fields
    if min(batch, *heads, *dims) < 1 or min(queries, keys) < 0:
        raise InvalidArgument(f"shape {shape!r} holds a size below 1")
    if heads[0] % heads[-1]:
        raise InvalidArgument(f"{heads[0]} query heads cannot share {heads[-1]} key heads")
    return AttnSpec(
        batch=batch,
        q_heads=heads[0],
        kv_heads=heads[-1],
        q_len=queries,
        kv_len=keys,
        head_dim=dims[0],
        v_head_dim=dims[-1],
        dtype=dtype,
        v_dtype=dtype,
        device="cuda" if arch else "cpu",
        arch=arch or None,
        mask=MaskKind(mask),
    )
