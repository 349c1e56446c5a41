"""`sagepatch run`: generate with a patched model, compare with exact attention, report layer by
layer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sagepatch.api import Patch, apply
from sagepatch.api import calibrate as measure
from sagepatch.cli.console import err, hint, out
from sagepatch.cli.generate import Result, Settings, generate, settings_for
from sagepatch.cli.loading import Loaded, load, pick_device, pick_dtype
from sagepatch.cli.options import (
    Device,
    Dtype,
    Emulate,
    Model,
    Offload,
    ReportPath,
    Threshold,
    check_offload,
    check_report_path,
)
from sagepatch.errors import InvalidArgument, SagepatchError
from sagepatch.plan import Plan, write_bytes, write_text
from sagepatch.report.model import Report
from sagepatch.report.pictures import Comparison, frame, png_bytes


def run(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What to draw, film or write.")],
    out_path: Annotated[
        Path | None, typer.Option("--out", help="Where the result goes; default ./sagepatch.png.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise; the same for both runs.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Denoising steps, or tokens of text.")] = None,
    height: Annotated[int | None, typer.Option()] = None,
    width: Annotated[int | None, typer.Option()] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a video.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "none",
    plan: Annotated[Path | None, typer.Option(help="Run a saved plan.")] = None,
    variant: Annotated[
        str, typer.Option(help="auto, a tier (fast, safe, exact), a recipe or a full kernel name.")
    ] = "auto",
    threshold: Threshold = 0.998,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Run exact first, then quantised, from one seed. On by default for the demo.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Fail instead of running exact where a kernel cannot serve.")
    ] = False,
    emulate: Emulate = None,
    report: ReportPath = None,
) -> None:
    """Generate with MODEL on quantised attention and report what each layer ran and why."""
    check_report_path(report)
    check_offload(offload)
    if plan is not None and variant != "auto":
        raise InvalidArgument("--plan and --variant exclude each other: a plan names the variants")
    loaded_plan = None if plan is None else Plan.load(plan)
    where = pick_device(device)
    demo = model == "demo"
    if demo:
        _hint_unknown_words(prompt)
    emulated = (demo and where == "cpu") if emulate is None else emulate
    with err().status(f"loading {model}"):
        loaded = load(model, device=where, dtype=pick_dtype(dtype, where), offload=offload)
    settings = settings_for(
        loaded, prompt, seed=seed, steps=steps, height=height, width=width, frames=frames
    )
    rules: dict[str, Any] = {"threshold": threshold, "strict": strict, "emulate": emulated}
    if demo if compare is None else compare:
        patch, exact = _exact_then_patched(loaded, settings, loaded_plan, variant, rules)
    else:
        patch, exact = apply(loaded.model, plan=loaded_plan, variant=variant, **rules), None
    start = time.perf_counter()
    try:
        result = generate(loaded, settings, "with the plan" if patch.locked else "calibrating")
        seconds = time.perf_counter() - start
        patch.lock()
        said = patch.report()
    finally:
        patch.restore()
    _deliver(loaded, result, exact, said, out_path, report, seconds)


def _exact_then_patched(
    loaded: Loaded, settings: Settings, plan: Plan | None, variant: str, rules: dict[str, Any]
) -> tuple[Patch, Result]:
    """Generate with exact attention, calibrating on the way if nothing else decides; then patch."""
    exact: list[Result] = []

    def run_exact() -> None:
        exact.append(generate(loaded, settings, "exact attention, calibrating"))

    if plan is None and variant == "auto":
        table = measure(loaded.model, run_exact, emulate=rules["emulate"])
        plan = table.plan(rules["threshold"])
    else:
        # Before the first generation: a plan or variant that does not fit fails at once.
        apply(loaded.model, plan=plan, variant=variant, **rules).restore()
        run_exact()
    return apply(loaded.model, plan=plan, variant=variant, **rules), exact[0]


def _deliver(
    loaded: Loaded,
    result: Result,
    exact: Result | None,
    said: Report,
    out_path: Path | None,
    report: Path | None,
    seconds: float,
) -> None:
    """Write and print everything; the pictures first, so that a failing report loses nothing."""
    faults: tuple[str, ...] = ()
    if result.text is not None:
        if out_path is not None:
            write_text(out_path, result.text + "\n")
        out().print(result.text, markup=False, highlight=False)
        if exact is not None:
            same = "the same text as" if exact.text == result.text else "another text than"
            out().print(f"{same} exact attention", style="bold")
    else:
        target = out_path or Path("sagepatch.png")
        if exact is not None:
            pictures = Comparison.of(exact.frames, result.frames)
            pictures.save_side_by_side(target)
            said = said.with_pictures(pictures)
            faults = pictures.faults()
        else:
            write_bytes(target, _encoded(result, target))
        out().print(f"wrote {target} ({seconds:.1f} s for the last run)", highlight=False)
    out().print(said)
    if report is not None:
        _write_report(said, report)
    if faults:
        raise SagepatchError(f"{faults[0]}, the exact one is not: please report this with the plan")


def _encoded(result: Result, target: Path) -> bytes:
    if len(result.frames) == 1:
        return png_bytes(frame(result.frames[0]))
    return _animation(result, target)


def _animation(result: Result, target: Path) -> bytes:
    """A video as an animated PNG or GIF, by the ending of the file name."""
    import io

    from PIL import Image

    pictures = [Image.fromarray(frame(picture)) for picture in result.frames]
    kind = "GIF" if target.suffix == ".gif" else "PNG"
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, kind, save_all=True, append_images=pictures[1:], duration=1000 // 16, loop=0
    )
    return buffer.getvalue()


def _write_report(said: Report, path: Path) -> None:
    if path.suffix == ".json":
        said.to_json(path)
    elif path.suffix == ".html":
        said.to_html(path)
    else:
        said.plot(path)
    out().print(f"wrote {path}", highlight=False)


def _hint_unknown_words(prompt: str) -> None:
    from sagepatch.demo import nearest_captions, unknown_words

    unknown = unknown_words(prompt)
    if unknown:
        nearest = "; ".join(nearest_captions(prompt))
        hint(f"the demo never saw {', '.join(unknown)}; it knows: {nearest}")
