"""The demo pipeline under every condition: pictures against those of exact attention, and the error
over the denoising steps.

    python -m benchmarks.quality.demo [--captions N] [--seeds 3] [--seconds S]

Real kernels in bfloat16 where a GPU is, the emulator in FP32 elsewhere. Without --captions all
2,801 captions of the training are drawn; with it so many, drawn evenly. Writes demo_pictures.csv,
demo_steps.csv and demo_layers.csv beside this file (demo_cpu_*.csv off the GPU), or under --out.
With --seconds a condition that has not begun by then is left out, the last in the list first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sagepatch
from benchmarks.quality import layers, likeness, tables
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

    def batch(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Latents after each step [steps, n, tokens, channels] and pictures [n, 3, H, W] uint8."""
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
            num_inference_steps=STEPS,
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", nargs="+", help="these conditions, in this order")
    parser.add_argument("--part", choices=("pictures", "layers", "both"), default="both")
    parser.add_argument("--out", type=Path, default=tables.HERE)
    parser.add_argument("--commit")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = tables.provenance(tables.command_of("demo", sys.argv[1:]), options.commit)
    stem = options.out / ("demo" if device.type == "cuda" else "demo_cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    studio = Studio(load_pipeline(dtype, device), device, captions(options.captions), options.seeds)
    if options.part in ("pictures", "both"):
        write_pictures(studio, options.only, options.seconds, stem, about)
    if options.part in ("layers", "both"):
        single = [EXACT, *recipes(device), *baselines()]
        count = min(LAYER_PICTURES[device.type], studio.count)
        calls = layers.captured(studio.pipe, lambda: studio.batch(0, count), LAYER_CALLS)
        tables.write(Path(f"{stem}_layers.csv"), layers.rows(calls, single), about)


def write_pictures(
    studio: Studio,
    only: Sequence[str] | None,
    seconds: float | None,
    stem: Path,
    about: dict[str, str],
) -> None:
    """Draw under every condition; what is there is written after each."""
    device, started = studio.device, time.perf_counter()
    exact = studio.draw()
    print(f"{time.perf_counter() - started:.1f} s: {studio.count} exact pictures", flush=True)
    pictures: list[dict[str, object]] = []
    steps: list[dict[str, object]] = []

    def add(name: str, group: str, kernel: str, drawn: Drawn) -> None:
        pictures.append(compared(name, group, kernel, drawn, exact))
        steps.extend(over_steps(name, group, drawn, exact))
        tables.write(Path(f"{stem}_pictures.csv"), pictures, about)
        tables.write(Path(f"{stem}_steps.csv"), steps, about)
        shown = pictures[-1]
        took = f"{time.perf_counter() - started:.1f} s:"
        print(took, name, shown["psnr_db_mean"], shown["ssim_mean"], flush=True)

    add(OTHER_SEED, "yardstick", "sdpa.exact", other_seed(exact, studio.seeds))
    if device.type == "cuda":
        full = Studio(load_pipeline(torch.float32, device), device, studio.captions, studio.seeds)
        full.noise = studio.noise.float()
        add(FULL_WIDTH, "yardstick", "sdpa.exact in FP32", full.draw())
    for condition in chosen(studio, only):
        if seconds is not None and time.perf_counter() - started > seconds:
            print(f"out of time before {condition.name}", flush=True)
            break
        try:
            with under(condition, studio.pipe, device):
                drawn = studio.draw()
        except FAILURES:
            traceback.print_exc()
            continue
        add(condition.name, condition.group, condition.kernel(device), drawn)


def chosen(studio: Studio, only: Sequence[str] | None) -> list[Condition]:
    """What is compared, in order: what matters most first, or `only` these."""
    device = studio.device
    found = recipes(device)
    others = [*found[: len(FIRST)], *baselines(), *found[len(FIRST) :]]
    names = [condition.name for condition in others]
    if only is not None and set(only) <= set(names):
        return [others[names.index(name)] for name in only]
    count = min(CALIBRATION_PICTURES[device.type], studio.count)
    calibration = sagepatch.calibrate(
        studio.pipe, run=lambda: studio.batch(0, count), emulate=device.type == "cpu"
    )
    plans = [Condition("calibrated plan", "plan", calibration.plan())]
    if device.type == "cuda":
        # Where attention is as short as here, exact is often the fastest, and a plan shows nothing.
        plans.append(Condition("plan by accuracy alone", "plan", by_accuracy(calibration)))
    every = {condition.name: condition for condition in (*plans, *others)}
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
