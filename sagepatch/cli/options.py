"""Options that several commands share, each spelt once."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sagepatch.cli.generation import NEW_TOKENS, Job, no_tokens
from sagepatch.cli.sources import Source
from sagepatch.errors import InvalidArgument

Model = Annotated[
    str, typer.Argument(help="A preset (flux, wan, llama ... or demo), a folder, or a hub id.")
]
Prompt = Annotated[str, typer.Option(help="What to draw, film or continue.")]
# torch.Generator takes seeds of this range.
Seed = Annotated[int, typer.Option(min=-(1 << 63), max=(1 << 63) - 1, help="Seed of the noise.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps.")]
Width = Annotated[int | None, typer.Option(min=8, help="Pixels.")]
Height = Annotated[int | None, typer.Option(min=8, help="Pixels.")]
Frames = Annotated[int | None, typer.Option(min=1, help="Frames of a video.")]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, help=f"New tokens of a language model. [default: {NEW_TOKENS}]"),
]
Dtype = Annotated[str, typer.Option(help="auto, fp32, fp16 or bf16; auto is bf16 on a GPU.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Offload = Annotated[str, typer.Option(help="none, model or sequential: saves GPU memory.")]
Threshold = Annotated[
    float, typer.Option(help="Least cosine, in the worst head, that a kernel must keep.")
]
Emulate = Annotated[
    bool | None,
    typer.Option(
        "--emulate/--no-emulate",
        help="Admit emulated kernels: slow, they show accuracy. Default: the demo on a CPU only.",
    ),
]
Report = Annotated[
    Path | None, typer.Option(help="Also write the per-layer report: .html, .json or .png.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_bound(name: str, value: float | None, least: float = -math.inf) -> None:
    """Refuse a bound that says nothing, before a run is made for it."""
    if value is not None and not (math.isfinite(value) and value >= least):
        needed = "a number" if least == -math.inf else f"a number from {least:g} up"
        raise InvalidArgument(f"{name} is {value:g}, needs {needed}")


def job_of(
    source: Source,
    prompt: str,
    *,
    seed: int,
    steps: int | None = None,
    width: int | None = None,
    height: int | None = None,
    frames: int | None = None,
    tokens: int | None = None,
) -> Job:
    """The job that the options describe, on top of what the preset's documentation calls for."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the prompt {prompt!a} holds bytes that are no text") from error
    if tokens is not None and source.task in ("image", "video"):
        raise InvalidArgument(no_tokens(source.asked))
    asked = {
        "num_inference_steps": steps,
        "width": width,
        "height": height,
        "num_frames": frames,
    }
    options: dict[str, Any] = dict(source.preset.call) if source.preset else {}
    if source.is_demo:
        from sagepatch.demo import DEFAULTS

        options = asdict(DEFAULTS)
    options.update({name: value for name, value in asked.items() if value is not None})
    return Job(prompt, seed, options, tokens)


def emulation(source: Source, device_type: str, asked: bool | None) -> bool:
    """Whether emulated kernels are admitted: as asked, else for the demo on a CPU."""
    return asked if asked is not None else source.is_demo and device_type == "cpu"
