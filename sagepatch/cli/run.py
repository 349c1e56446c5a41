"""`sagepatch run`: generate with a patched model, and on request compare with the exact result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sagepatch.api import Patch, apply, calibrate
from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.cli import options as o
from sagepatch.cli.console import out, progress, say, tell
from sagepatch.cli.generation import Job, Made, check, generate, patched_part, prepare
from sagepatch.cli.loading import LanguageModel, Placement, load
from sagepatch.cli.rehearsal import rehearse
from sagepatch.cli.saving import (
    PICTURES,
    TEXTS,
    VIDEOS,
    check_apart,
    check_report,
    check_target,
    default_target,
    save,
    write_report,
)
from sagepatch.cli.sources import Source, resolve
from sagepatch.dispatch import Request
from sagepatch.env import disabled
from sagepatch.errors import InvalidArgument
from sagepatch.plan import Plan
from sagepatch.plan_cache import keep_plan
from sagepatch.report.model import Report
from sagepatch.report.pictures import Comparison, flat_among


@dataclass(frozen=True, slots=True)
class Choice:
    """How the layers get their kernels."""

    plan: Plan | None
    request: Request
    threshold: float
    strict: bool

    @property
    def calibrates(self) -> bool:
        return self.plan is None and self.request.variant == "auto"

    @property
    def emulates(self) -> bool:
        """Whether a layer may run an emulated kernel."""
        if self.plan is not None:
            return self.plan.emulated and self.request.emulate
        named = [kernel for kernel in CATALOGUE if self.request.wants(kernel)]
        asked = self.request.emulate or self.request.by_full_name
        return asked and any(kernel.toolchain == "emulated" for kernel in named)


@dataclass(slots=True)
class Outcome:
    """What there is to show and save, even where the run ended early."""

    runs: list[Made] = field(default_factory=list)
    report: Report | None = None
    # Whether the first run measured the layers as well.
    measured: bool = False


def run(
    model: o.Model,
    prompt: o.Prompt,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Picture, video or text file. Default: here, named after it."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Follow this plan.")] = None,
    variant: Annotated[
        str, typer.Option(help="auto, a tier (fast, safe, exact), a recipe or a full name.")
    ] = "auto",
    threshold: o.Threshold = 0.998,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Generate exactly too, from the same seed. Default: the demo only.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Fail where a layer would fall back to exact attention.")
    ] = False,
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
    """Generate with quantised attention: sagepatch run flux --prompt "a cat"."""
    where = Placement.of(device, dtype, offload)
    source = resolve(model)
    emulated = o.emulation(source, where.device.type, emulate)
    if plan is not None and variant != "auto":
        raise InvalidArgument("--plan and --variant exclude each other: a plan names the variants")
    o.check_bound("--threshold", threshold)
    choice = Choice(
        None if plan is None else Plan.load(plan), Request(variant, emulated), threshold, strict
    )
    if out_file is not None:
        check_target(out_file, tuple({*PICTURES, *VIDEOS, *TEXTS}), "--out")
    elif source.task != "text":
        check_target(default_target(source.slug, ".png"), PICTURES, "the picture")
    if report is not None:
        check_report(report)
    made_here = None if source.task == "text" else default_target(source.slug, ".png")
    check_apart({"--plan": plan, "--out": out_file or made_here, "--report": report})
    job = o.job_of(
        source,
        prompt,
        seed=seed,
        steps=steps,
        width=width,
        height=height,
        frames=frames,
        tokens=tokens,
    )
    if source.is_demo:
        hint_captions(prompt)
    with progress(f"loading {source.asked}"):
        loaded = load(source, where)
    check(loaded, job)
    if out_file is not None:
        writes = isinstance(loaded, LanguageModel)
        check_target(out_file, TEXTS if writes else tuple({*PICTURES, *VIDEOS}), "--out")
    if choice.plan is not None:
        # A plan for another model is refused now, not after the exact generation.
        patched(loaded, choice).restore()
    if strict and not choice.calibrates and choice.plan is None:
        with progress("rehearsing one step") as step:
            rehearse(
                patched_part(loaded),
                lambda: generate(loaded, job.shortened(), step),
                choice.request,
            )
    if choice.emulates and not disabled():
        say("Emulated kernels: slower than exact attention. This shows accuracy, not speed.")
    outcome = Outcome()
    try:
        both = source.is_demo if compare is None else compare
        with one_thread(source.is_demo and where.device.type == "cpu"):
            (compared if both else single)(loaded, job, choice, outcome)
    finally:
        if outcome.runs:
            keep(outcome, source, loaded, out_file)
    show(outcome, report, choice.emulates)


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """The demo's tensors are so small that threads cost more than they bring, most of all on a
    busy machine, where they wait for each other.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single(loaded: Any, job: Job, choice: Choice, outcome: Outcome) -> None:
    """One generation; layers without a plan measure themselves in its first calls."""
    with patched(loaded, choice) as patch:
        unsettled = not patch.locked
        with progress("calibrating and generating" if unsettled else "generating") as step:
            if unsettled:
                outcome.measured = True
                prepare(loaded, job)
            outcome.runs.append(generate(loaded, job, step))
        patch.lock()
        outcome.report = patch.report()
    if unsettled:
        say(
            "The layers measured themselves on this run's first calls, which were exact; "
            "`sagepatch calibrate` makes a plan to start from."
        )


def compared(loaded: Any, job: Job, choice: Choice, outcome: Outcome) -> None:
    """The exact generation, then the quantised one from the same seed."""
    model = patched_part(loaded)
    calibration = None
    if choice.calibrates:
        outcome.measured = True
        with progress("exact, calibrating") as step:

            def exact_run() -> None:
                prepare(loaded, job)
                outcome.runs.append(generate(loaded, job, step))

            calibration = calibrate(model, run=exact_run, emulate=choice.request.emulate)
        plan = calibration.plan(choice.threshold)
        patch = apply(model, plan=plan, strict=choice.strict, emulate=choice.request.emulate)
        keep_plan(plan, patch.machine)
    else:
        with progress("exact") as step:
            outcome.runs.append(generate(loaded, job, step))
        patch = patched(loaded, choice)
    with patch:
        with progress("quantised") as step:
            outcome.runs.append(generate(loaded, job, step))
        outcome.report = patch.report()
    # A run that measured took longer than an exact one; the calibration knows by how much.
    apart = calibration.run_seconds or None if calibration else outcome.runs[0].seconds
    outcome.report = outcome.report.with_run_time(outcome.runs[-1].seconds, apart)
    if calibration is not None:
        outcome.report = outcome.report.with_calibration(calibration)
    exact, quantised = outcome.runs
    if exact.frames:
        outcome.report = outcome.report.with_pictures(Comparison.of(exact.frames, quantised.frames))


def patched(loaded: Any, choice: Choice) -> Patch:
    """The model patched as chosen."""
    return apply(
        patched_part(loaded),
        plan=choice.plan,
        variant=choice.request.variant,
        threshold=choice.threshold,
        strict=choice.strict,
        emulate=choice.request.emulate,
    )


def keep(outcome: Outcome, source: Source, loaded: Any, out_file: Path | None) -> None:
    """Write what was made and say where; text goes to the terminal as well."""
    made = outcome.runs[0]
    if isinstance(loaded, LanguageModel):
        for title, run_ in zip(("exact", "quantised"), outcome.runs, strict=False):
            tell(run_.text if len(outcome.runs) == 1 else f"[{title}] {run_.text}")
        if out_file is None:
            return
    suffix = ".webp" if made.is_video else ".png"
    path = save(outcome.runs, out_file or default_target(source.slug, suffix))
    layout = "exact left, quantised right" if len(outcome.runs) == 2 else "one run"
    tell(f"{path} ({layout})", style="bold")


def show(outcome: Outcome, target: Path | None, emulated: bool) -> None:
    """The report in the terminal and in a file, and what a reader should not miss."""
    if outcome.report is None:
        return
    out().print(outcome.report)
    if len(outcome.runs) == 2 and outcome.runs[0].tokens:
        tell(same_words(*outcome.runs))
    pictures = outcome.report.pictures
    for fault in () if pictures is None else pictures.faults():
        say(f"Look at it: {fault}, and the exact one is not.", style="red")
    if len(outcome.runs) == 1:
        frames = outcome.runs[0].frames
        for fault in flat_among(frames, len(frames)):
            say(f"Look at it: {fault}. --compare draws it with exact attention, too.", style="red")
    say(took([run_.seconds for run_ in outcome.runs], outcome.measured, emulated))
    if target is not None:
        write_report(outcome.report, target)
        tell(f"{target}", style="bold")


def took(seconds: Sequence[float], measured: bool, emulated: bool) -> str:
    """How long each run took, and what it was; `measured`: the first measured the layers, too.

    >>> took([13.8, 13.3], True, False)
    'Took 13.8 s exact (calibrating too), 13.3 s quantised.'
    """
    too = " (calibrating too)" if measured else ""
    first, *others = [f"{one:.1f} s" for one in seconds]
    if not others:
        return f"Took {first}{too}."
    kind = "emulated, which says nothing of speed" if emulated else "quantised"
    return f"Took {first} exact{too}, {others[0]} {kind}."


def same_words(exact: Made, quantised: Made) -> str:
    """How far two texts agree."""
    pairs = zip(exact.tokens, quantised.tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    total = len(exact.tokens)
    if same is None and total == len(quantised.tokens):
        return f"quantised against exact text: all {total} tokens are the same"
    first = min(total, len(quantised.tokens)) if same is None else same
    return f"quantised against exact text: the first {first} of {total} tokens are the same"


def hint_captions(prompt: str) -> None:
    """Say which words the demo does not know, and what it draws instead."""
    from sagepatch.demo import nearest_captions, unknown_words

    unknown = unknown_words(prompt)
    if unknown:
        near = ", ".join(f'"{caption}"' for caption in nearest_captions(prompt))
        words = ", ".join(f'"{word}"' for word in unknown)
        say(f"The demo was never taught {words}. It draws emoji; try {near}.", style="yellow")
