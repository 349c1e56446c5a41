"""The demo pipeline under every condition: pictures against those of exact attention, and the error
over the denoising steps.

    python -m benchmarks.quality.demo [--captions N] [--then-all] [--seeds 3] [--seconds S]

Real kernels in bfloat16 where a GPU is, the emulator in FP32 elsewhere. Without --captions all
2,801 captions of the training are drawn; with it so many, drawn evenly, and with --then-all
afterwards all of them again, by one condition after the other: each row tells its n. Writes
demo_pictures.csv, demo_steps.csv and demo_layers.csv beside this file (demo_cpu_*.csv off the GPU),
or under --out. With --seconds a condition that has not begun by then, or would not end by then, is
left out, the last in the list first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sagepatch
from benchmarks.quality import ahead, layers, likeness, tables
from benchmarks.quality.baselines import FP8_PER_TENSOR, NAIVE_INT8
from benchmarks.quality.conditions import (
    EXACT,
    FAILURES,
    FIRST,
    Condition,
    baselines,
    recipes,
    under,
)
from benchmarks.quality.intervals import Spread, frechet_distance
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.demo.captions import FILE

STEPS = DEFAULTS.num_inference_steps
CHANNELS_IN = 16
# Pictures at once; those that a calibration sees, and those whose layers are looked at.
BATCH = {"cuda": 256, "cpu": 2}
CALIBRATION_PICTURES = {"cuda": 256, "cpu": 1}
LAYER_PICTURES = {"cuda": 4, "cpu": 1}
# The calls of a layer whose errors are taken: the first and the last step.
LAYER_CALLS = (1, 8)
OTHER_SEED = "exact, another seed"
FULL_WIDTH = "exact in FP32"
PLAN, BY_ACCURACY = "calibrated plan", "plan by accuracy alone"
# What is drawn with every caption first; what computes in plain torch takes too long for it.
WHOLE = (PLAN, "sage2_8", "sage1_b", "sage2_4", "sage1_vb", "sage2pp_8", "sage1_t")
PLAIN = (NAIVE_INT8, FP8_PER_TENSOR)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one condition drew: latents after each step [steps, N, ...], pictures uint8 and their
    features.
    """

    latents: Tensor
    pictures: Tensor
    features: Tensor


@dataclass(eq=False)
class Studio:
    """A pipeline with its texts encoded and its noise drawn once: caption-major, seeds inside."""

    pipe: Any
    device: torch.device
    captions: Sequence[str]
    seeds: int

    def __post_init__(self) -> None:
        self.pipe.set_progress_bar_config(disable=True)
        dtype = self.pipe.transformer.dtype
        size = (DEFAULTS.height // 2 // 2) * (DEFAULTS.width // 2 // 2)
        noise = [
            torch.randn(1, size, CHANNELS_IN, generator=torch.Generator().manual_seed(seed))
            for seed in range(self.seeds)
        ]
        self.noise = torch.cat(noise).to(self.device, dtype)
        with torch.inference_mode():
            parts = [
                self.pipe.encode_prompt(
                    prompt=list(self.captions[at : at + 256]),
                    prompt_2=None,
                    device=self.device,
                    max_sequence_length=DEFAULTS.max_sequence_length,
                )
                for at in range(0, len(self.captions), 256)
            ]
        self.text = torch.cat([part[0] for part in parts])
        self.pooled = torch.cat([part[1] for part in parts])

    @property
    def count(self) -> int:
        return len(self.captions) * self.seeds

    def sizes(self) -> set[int]:
        """How many pictures `draw` has at once."""
        size = BATCH[self.device.type]
        return {min(size, self.count), self.count % size} - {0}

    def batch(self, first: int, last: int, count: int = STEPS) -> tuple[Tensor, Tensor]:
        """Latents after each of `count` steps [steps, n, tokens, channels] and pictures
        [n, 3, H, W] uint8.
        """
        numbers = torch.arange(first, last, device=self.device)
        caption, seed = numbers // self.seeds, numbers % self.seeds
        steps: list[Tensor] = []

        def keep(pipe: Any, step: int, when: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
            steps.append(found["latents"].clone())
            return {}

        images = self.pipe(
            prompt_embeds=self.text[caption],
            pooled_prompt_embeds=self.pooled[caption],
            latents=self.noise[seed].clone(),
            height=DEFAULTS.height,
            width=DEFAULTS.width,
            num_inference_steps=count,
            guidance_scale=DEFAULTS.guidance_scale,
            output_type="pt",
            callback_on_step_end=keep,
        ).images
        return torch.stack(steps), likeness.bytes_of(images)

    def draw(self) -> Drawn:
        """Every caption with every seed."""
        size = BATCH[self.device.type]
        latents, pictures = [], []
        for first in range(0, self.count, size):
            found, images = self.batch(first, min(first + size, self.count))
            latents.append(found)
            pictures.append(images)
        whole = torch.cat(pictures)
        return Drawn(torch.cat(latents, 1), whole, likeness.features(self.pipe.vae, whole))


def compared(name: str, group: str, kernel: str, drawn: Drawn, exact: Drawn) -> dict[str, object]:
    """One row of the table of pictures."""
    spread = float(exact.features.std(0).square().mean().sqrt())
    noise = likeness.psnr_db(drawn.pictures, exact.pictures).tolist()
    alike = likeness.ssim(drawn.pictures, exact.pictures).tolist()
    apart = likeness.feature_distance(drawn.features, exact.features, spread).tolist()
    psnr, ssim = Spread.of(noise, low_is_bad=True), Spread.of(alike, low_is_bad=True)
    far = Spread.of(apart, low_is_bad=False)
    distance = frechet_distance(
        *(likeness.pooled(d.features).cpu().numpy() for d in (drawn, exact))
    )
    return {
        "condition": name,
        "group": group,
        "kernel": kernel,
        "n": len(noise),
        "equal": len(noise) - psnr.n,
        "psnr_db_mean": f"{psnr.mean:.3f}",
        "psnr_db_sd": f"{psnr.sd:.3f}",
        "psnr_db_worst": f"{psnr.worst:.2f}",
        "ssim_mean": f"{ssim.mean:.5f}",
        "ssim_sd": f"{ssim.sd:.5f}",
        "ssim_worst": f"{ssim.worst:.4f}",
        "feature_distance_mean": f"{far.mean:.5f}",
        "feature_distance_sd": f"{far.sd:.5f}",
        "feature_distance_worst": f"{far.worst:.4f}",
        "frechet_distance": f"{distance:.6f}",
    }


def over_steps(name: str, group: str, drawn: Drawn, exact: Drawn) -> list[dict[str, object]]:
    """Relative RMS error of the latents after each step: one row a step."""
    found = []
    for step, (a, b) in enumerate(zip(drawn.latents, exact.latents, strict=True), 1):
        off = (a.double() - b.double()).flatten(1).norm(dim=1)
        errors = Spread.of((off / b.double().flatten(1).norm(dim=1)).tolist(), low_is_bad=False)
        found.append(
            {
                "condition": name,
                "group": group,
                "step": step,
                "n": errors.n,
                "error_mean": f"{errors.mean:.6f}",
                "error_sd": f"{errors.sd:.6f}",
                "error_worst": f"{errors.worst:.6f}",
            }
        )
    return found


def other_seed(exact: Drawn, seeds: int) -> Drawn:
    """The exact pictures of the same captions with the next seed: the yardstick."""

    def turned(x: Tensor, axis: int) -> Tensor:
        apart = x.unflatten(axis, (-1, seeds))
        return apart.roll(1, axis + 1).flatten(axis, axis + 1)

    return Drawn(turned(exact.latents, 1), turned(exact.pictures, 0), turned(exact.features, 0))


def captions(count: int | None) -> list[str]:
    """All captions of the training, or `count` of them, evenly drawn."""
    every = list(json.loads(FILE.read_text(encoding="utf-8"))["captions"])
    if count is None or count >= len(every):
        return every
    return [every[at * len(every) // count] for at in range(count)]


def main() -> None:
    """Draw under every condition, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captions", type=int)
    parser.add_argument("--then-all", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", nargs="+", help="these conditions, in this order")
    parser.add_argument("--part", choices=("pictures", "layers", "both"), default="both")
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--commit")
    options = parser.parse_args()
    clock = Clock(options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ahead.share_cache()
    about = tables.provenance(tables.command_of("demo", sys.argv[1:]), options.commit)
    stem = options.out / ("demo" if device.type == "cuda" else "demo_cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = load_pipeline(dtype, device)
    studio = Studio(pipe, device, captions(options.captions), options.seeds)
    whole = Studio(pipe, device, captions(None), options.seeds) if options.then_all else None
    if ahead.is_rehearsal():
        rehearse(studio, whole)
        return
    many = device.type == "cuda" and options.only is None
    helpers = ahead.start("benchmarks.quality.demo", sys.argv[1:]) if many else []
    shown = Results(stem, about, clock)
    exact_whole, conditions, whole_took = None, [], 0.0
    if options.part in ("pictures", "both"):
        exact = studio.draw()
        clock.say(f"{studio.count} exact pictures")
        began = clock.now
        exact_whole = None if whole is None else whole.draw()
        whole_took = clock.now - began
        known = studio if whole is None else whole
        clock.say(f"{known.count} exact pictures")
        other = other_seed(exact_whole or exact, options.seeds)
        shown.add(OTHER_SEED, "yardstick", "sdpa.exact", other, exact_whole or exact)
        for helper in helpers:
            helper.wait()
        clock.say("compiled ahead:", [helper.poll() for helper in helpers])
        if many:
            full = Studio(
                load_pipeline(torch.float32, device), device, studio.captions, studio.seeds
            )
            full.noise = studio.noise.float()
            shown.add(FULL_WIDTH, "yardstick", "sdpa.exact in FP32", full.draw(), exact)
        conditions = chosen(studio, options.only)
        compare_all(studio, conditions, exact, shown)
    if options.part in ("layers", "both"):
        single = [EXACT, *recipes(device), *baselines()]
        count = min(LAYER_PICTURES[device.type], studio.count)
        calls = layers.captured(studio.pipe, lambda: studio.batch(0, count), LAYER_CALLS)
        tables.write(Path(f"{stem}_layers.csv"), layers.rows(calls, single), about)
        clock.say("layers written")
    if whole is not None and exact_whole is not None:
        compare_all(whole, first_of(conditions, WHOLE), exact_whole, shown, whole_took)


class Clock:
    """Seconds since the start, and how many there are."""

    def __init__(self, seconds: float | None) -> None:
        self.started, self.seconds = time.perf_counter(), seconds

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        return self.seconds is None or self.now + seconds <= self.seconds

    def say(self, *words: object) -> None:
        print(f"{self.now:.1f} s:", *words, flush=True)


class Results:
    """The tables of pictures and steps, written anew whenever a condition joins them or is drawn
    again with more pictures.
    """

    def __init__(self, stem: Path, about: Mapping[str, str], clock: Clock) -> None:
        self.stem, self.about, self.clock = stem, about, clock
        self.pictures: dict[str, dict[str, object]] = {}
        self.steps: dict[str, list[dict[str, object]]] = {}

    def add(self, name: str, group: str, kernel: str, drawn: Drawn, exact: Drawn) -> None:
        row = self.pictures[name] = compared(name, group, kernel, drawn, exact)
        self.steps[name] = over_steps(name, group, drawn, exact)
        tables.write(Path(f"{self.stem}_pictures.csv"), list(self.pictures.values()), self.about)
        steps = [step for rows in self.steps.values() for step in rows]
        tables.write(Path(f"{self.stem}_steps.csv"), steps, self.about)
        self.clock.say(name, row["n"], row["psnr_db_mean"], row["ssim_mean"])


def compare_all(
    studio: Studio,
    conditions: Iterable[Condition],
    exact: Drawn,
    shown: Results,
    longest: float = 0.0,
) -> None:
    """Draw under each condition while there is time for the longest yet, to begin with `longest`
    seconds.
    """
    for condition in conditions:
        if not shown.clock.allows(longest):
            shown.clock.say(f"no time for {condition.name}")
            break
        began = shown.clock.now
        try:
            with under(condition, studio.pipe, studio.device):
                drawn = studio.draw()
        except FAILURES:
            traceback.print_exc()
            continue
        shown.add(condition.name, condition.group, condition.kernel(studio.device), drawn, exact)
        longest = max(longest, shown.clock.now - began)


def first_of(conditions: Sequence[Condition], names: Sequence[str]) -> list[Condition]:
    """The conditions in another order, those of `names` first; without those in plain torch."""
    kept = [condition for condition in conditions if condition.name not in PLAIN]
    weight = {name: place for place, name in enumerate(names)}
    return sorted(kept, key=lambda condition: weight.get(condition.name, len(weight)))


def rehearse(studio: Studio, whole: Studio | None) -> None:
    """This process's share of the kernels that a run calls, for one step each."""
    device = studio.device
    sizes = studio.sizes() | (set() if whole is None else whole.sizes())
    sizes.add(min(LAYER_PICTURES[device.type], studio.count))
    largest = whole or studio

    def one(condition: Condition) -> None:
        with under(condition, largest.pipe, device):
            for size in sorted(sizes):
                largest.batch(0, size, 1)

    work: list[tuple[str, Callable[[], object]]] = [("calibration", lambda: plans_of(studio))]
    work += [(found.name, partial(one, found)) for found in (*recipes(device), *baselines())]
    ahead.rehearse(work)


def plans_of(studio: Studio) -> list[Condition]:
    """The calibrated plan; on a GPU also the one by accuracy alone, where it is another."""
    device = studio.device
    count = min(CALIBRATION_PICTURES[device.type], studio.count)
    calibration = sagepatch.calibrate(
        studio.pipe, run=lambda: studio.batch(0, count), emulate=device.type == "cpu"
    )
    plan, accurate = calibration.plan(), by_accuracy(calibration)
    plans = [Condition(PLAN, "plan", plan)]
    # Where attention is as short as here, exact is often the fastest, and a plan shows nothing.
    if [one.variants for one in plan.entries] != [one.variants for one in accurate.entries]:
        plans.append(Condition(BY_ACCURACY, "plan", accurate))
    return plans


def chosen(studio: Studio, only: Sequence[str] | None) -> list[Condition]:
    """What is compared, in order: what matters most first, or `only` these."""
    found = recipes(studio.device)
    others = [*found[: len(FIRST)], *baselines(), *found[len(FIRST) :]]
    names = [condition.name for condition in others]
    if only is not None and set(only) <= set(names):
        return [others[names.index(name)] for name in only]
    every = {condition.name: condition for condition in (*plans_of(studio), *others)}
    return list(every.values()) if only is None else [every[name] for name in only]


def by_accuracy(calibration: sagepatch.Calibration) -> sagepatch.Plan:
    """The plan that quantises every layer that the usual threshold lets it, whatever the time."""
    untimed = (
        replace(layer, rows=tuple(replace(row, us_exact=None) for row in layer.rows))
        for layer in calibration.layers
    )
    return replace(calibration, layers=tuple(untimed)).plan()


if __name__ == "__main__":
    main()
