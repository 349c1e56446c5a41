"""Options that several commands share, and how a report or plan path is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sagepatch.errors import InvalidArgument

Model = Annotated[
    str, typer.Argument(help="demo, a preset (flux, sdxl, wan2.1-14b, ...), a path or a hub id.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (bf16 on a GPU, else fp32), bf16, fp16 or fp32.")]
Offload = Annotated[str, typer.Option(help="none, model or sequential CPU offload.")]
Threshold = Annotated[
    float, typer.Option(help="Least cosine in the worst head; above 1 all exact, 0 all finite.")
]
Emulate = Annotated[
    bool | None,
    typer.Option(
        "--emulate/--no-emulate",
        help="Admit emulated kernels: slow, shows accuracy. On by default for the demo on a CPU.",
    ),
]
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Also write the report: .html, .json or .png.")
]


def check_report_path(path: Path | None) -> None:
    """Refuse a report path of an unknown kind before any work is done."""
    if path is not None and path.suffix not in (".html", ".json", ".png"):
        raise InvalidArgument(f"--report {path} must end in .html, .json or .png")


def check_offload(offload: str) -> None:
    """Refuse an unknown way to offload before any work is done."""
    if offload not in ("none", "model", "sequential"):
        raise InvalidArgument(f"--offload is {offload!r}, needs none, model or sequential")
