"""`sagepatch calibrate`: measure every layer's kernels on prompts and save a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagepatch.api import calibrate as measure
from sagepatch.cli.console import err, out
from sagepatch.cli.generate import generate, settings_for
from sagepatch.cli.loading import load, pick_device, pick_dtype
from sagepatch.cli.options import (
    Device,
    Dtype,
    Emulate,
    Model,
    Offload,
    Threshold,
    check_offload,
)


def calibrate(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="A prompt to calibrate on; may be repeated.")],
    plan: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("plan.json"),
    seed: Annotated[int, typer.Option()] = 0,
    steps: Annotated[int | None, typer.Option(help="Denoising steps, or tokens of text.")] = None,
    height: Annotated[int | None, typer.Option()] = None,
    width: Annotated[int | None, typer.Option()] = None,
    frames: Annotated[int | None, typer.Option()] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "none",
    threshold: Threshold = 0.998,
    emulate: Emulate = None,
) -> None:
    """Measure MODEL's layers on the prompts and save the plan that the threshold allows."""
    check_offload(offload)
    where = pick_device(device)
    emulated = (model == "demo" and where == "cpu") if emulate is None else emulate
    with err().status(f"loading {model}"):
        loaded = load(model, device=where, dtype=pick_dtype(dtype, where), offload=offload)

    def generations() -> None:
        for text in prompt:
            settings = settings_for(
                loaded, text, seed=seed, steps=steps, height=height, width=width, frames=frames
            )
            generate(loaded, settings, f"calibrating on {text!r}")

    table = measure(loaded.model, generations, emulate=emulated)
    solved = table.plan(threshold)
    solved.save(plan)
    for entry in solved.entries:
        out().print(f"{entry.site}  {entry.variant}  {entry.reason}", highlight=False, markup=False)
    out().print(f"wrote {plan} ({len(solved.entries)} layers)", highlight=False)
