"""`sagepatch calibrate`: measure every layer's kernels on prompts and write a plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sagepatch import api
from sagepatch.cli import options as o
from sagepatch.cli.console import out, progress, say, tell
from sagepatch.cli.generation import Job, check, generate, patched_part, prepare
from sagepatch.cli.loading import Placement, load
from sagepatch.cli.saving import check_apart, check_report, check_target, write_report
from sagepatch.cli.sources import resolve
from sagepatch.errors import InvalidArgument, MachineError
from sagepatch.plan import DEFAULT_THRESHOLD
from sagepatch.plan_cache import keep_plan


def calibrate(
    model: o.Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt to measure on; repeat for more.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file of more prompts, one a line.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Keep all measurements in this JSON file after each prompt; where it exists "
            "already, go on from it: prompts that it holds are not run again."
        ),
    ] = None,
    by_step: Annotated[
        bool,
        typer.Option(
            "--by-step/--one-kernel",
            help="Let a layer run different kernels in different parts of the denoising schedule, "
            "or one throughout.",
        ),
    ] = True,
    out_file: Annotated[Path, typer.Option("--out", help="The plan.")] = Path("plan.json"),
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Least cosine, in the worst head, that a kernel must keep. "
            f"[default: {DEFAULT_THRESHOLD}]"
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Instead of a threshold: the largest relative error of the model's output that "
            "the layers' errors predict, for instance 0.05."
        ),
    ] = None,
    time_us: Annotated[
        float | None,
        typer.Option(
            "--time-us",
            help="Instead of a threshold: the most microseconds for one call of every layer.",
        ),
    ] = None,
    emulate: o.Emulate = None,
    report: o.Report = None,
    seed: o.Seed = 0,
    steps: o.Steps = None,
    width: o.Width = None,
    height: o.Height = None,
    frames: o.Frames = None,
    tokens: o.Tokens = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    offload: o.Offload = "none",
) -> None:
    """Measure each layer's kernels on prompts and write the plan that the bound allows.

    Measuring takes at most about as long as generating. Ctrl-C ends it early and keeps what was
    measured.
    """
    texts = [*(prompt or ()), *_lines(prompts)]
    if not texts:
        raise InvalidArgument("nothing to measure on: give --prompt, or --prompts with a text file")
    bounds = {"--threshold": threshold, "--budget": budget, "--time-us": time_us}
    given = [f"{name} {value:g}" for name, value in bounds.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)} exclude each other: pass one of them")
    o.check_bound("--threshold", threshold)
    o.check_bound("--budget", budget, 0)
    o.check_bound("--time-us", time_us, 0)
    where = Placement.of(device, dtype, offload)
    source = resolve(model)
    check_target(out_file, (".json",), "--out")
    if table is not None:
        check_target(table, (".json",), "--table")
    if report is not None:
        check_report(report)
    check_apart({"--prompts": prompts, "--out": out_file, "--table": table, "--report": report})
    known = table is not None and table.exists()
    if time_us is not None and where.device.type == "cpu" and not known:
        raise MachineError("--time-us needs measured times, which only a GPU gives: pass --budget")
    jobs = [
        o.job_of(
            source,
            text,
            seed=seed + number,
            steps=steps,
            width=width,
            height=height,
            frames=frames,
            tokens=tokens,
        )
        for number, text in enumerate(texts)
    ]
    with progress(f"loading {source.asked}"):
        loaded = load(source, where)
    for job in jobs:
        check(loaded, job)

    def generation(number: int, job: Job) -> None:
        try:
            with progress(f"calibrating on prompt {number} of {len(jobs)}") as step:
                prepare(loaded, job)
                generate(loaded, job, step)
        except KeyboardInterrupt:
            say("Interrupted: the plan is made of what was measured so far.", style="yellow")
            raise

    part = patched_part(loaded)
    emulated = o.emulation(source, where.device.type, emulate)
    calibration = api.calibrate_runs(
        part,
        [
            (api.run_name(job.prompt, job.seed, job.options), partial(generation, number, job))
            for number, job in enumerate(jobs, 1)
        ],
        table=table,
        emulate=emulated,
    )
    plan = calibration.plan(threshold, budget=budget, time_us=time_us, by_step=by_step)
    plan.save(out_file)
    with api.apply(part, plan=plan, emulate=emulated) as patch:
        # The next `apply` looks for a plan of its threshold.
        if budget is None and time_us is None:
            keep_plan(plan, patch.machine)
        made = patch.report().with_calibration(calibration)
    out().print(made)
    bound = given[0].removeprefix("--") if given else f"threshold {DEFAULT_THRESHOLD:g}"
    tell(f"{out_file}: {len(plan.entries)} layers at {bound}", style="bold")
    if calibration.measuring_seconds:
        tell(
            f"Measuring took {calibration.measuring_seconds:.1f} s beside "
            f"{calibration.run_seconds:.1f} s of generating"
            + (
                f", compiling {calibration.preparing_seconds:.1f} s."
                if calibration.preparing_seconds >= 0.05
                else "."
            )
        )
    if report is not None:
        write_report(made, report)
        tell(f"{report}", style="bold")


def _lines(path: Path | None) -> list[str]:
    """The prompts in a text file, one a line; blank lines are none."""
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is no text file: {error.reason}") from error
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise InvalidArgument(f"{path} holds no prompt")
    return found
