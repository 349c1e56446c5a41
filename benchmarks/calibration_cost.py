"""What a calibration costs against a generation: the demo pipeline, emulated on a CPU or on a GPU,
and there also layers of FLUX's size in a loop as diffusers writes them.

    python benchmarks/calibration_cost.py [--device cpu] [--rounds 3] [--layers 12]

Writes benchmarks/calibration_cost.csv, or one under --out: a row a model, number of steps and
round: the generation's own time and the measuring's, both of the same run, what compiling and
checking kernels took beside (once on a machine: in a GPU's first round), the steps that were
measured, how many candidates every sample of every layer has, and how many some had no time for.
Rows of the other kind of device in the file are kept.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sagepatch
from sagepatch.demo import DEFAULTS, load_pipeline
from sagepatch.env import Machine

STEPS = (4, 8, 28)
HERE = Path(__file__).with_suffix(".csv")
HEAD = (
    *("model", "steps", "round", "run_s", "measuring_s", "ratio", "compiling_s"),
    *("measured_steps", "candidates", "skipped", "about"),
)
# FLUX.1: 24 heads of 128, 4,096 tokens of a picture and 512 of text.
WIDTH, HEADS, TOKENS = 3072, 24, 4608

Draw = Callable[[int], object]


class Block(nn.Module):
    """Attention and a feed-forward of FLUX's width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.layer_norm(x, (WIDTH,))).unflatten(2, (3, HEADS, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


class Loop:
    """A denoising loop over blocks."""

    def __init__(self, blocks: nn.Module) -> None:
        self.blocks = blocks
        self.scheduler = type("Scheduler", (), {})()

    def __call__(self, steps: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        x = torch.randn(1, TOKENS, WIDTH, generator=generator, **options)
        self.scheduler.timesteps = torch.linspace(1, 0.05, steps, device="cuda")
        with torch.inference_mode():
            for t in self.scheduler.timesteps:  # noqa: B007  where a layer finds its step
                x = self.blocks(x)
        torch.cuda.synchronize()
        return x


def large(device: str, layers: int) -> tuple[nn.Module, Draw]:
    """Layers of FLUX's size in a loop."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.Sequential(*[Block().bfloat16() for _ in range(layers)]).eval()
    return blocks, Loop(blocks)


def demo(device: str) -> tuple[object, Draw]:
    """The bundled pipeline."""
    pipe = load_pipeline(torch.float32 if device == "cpu" else torch.bfloat16, device)
    pipe.set_progress_bar_config(disable=True)

    def draw(steps: int) -> object:
        arguments = {**asdict(DEFAULTS), "num_inference_steps": steps}
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe("a red apple", generator=generator, output_type="latent", **arguments)

    return pipe, draw


def models(device: str, layers: int) -> dict[str, Callable[[], tuple[object, Draw]]]:
    """What is calibrated, by name: makes the model, and what runs it with a number of steps."""
    found: dict[str, Callable[[], tuple[object, Draw]]] = {}
    if device != "cpu":
        found[f"{layers} layers of FLUX's size"] = partial(large, device, layers)
    return {**found, "demo pipeline": partial(demo, device)}


def main() -> None:
    """Calibrate on generations of a few lengths and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--out", type=Path, default=HERE.parent)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    began = time.perf_counter()
    here = Machine.here()
    versions = ", ".join(f"{name} {v}" for name, v in here.versions.items() if v)
    threads = f"{torch.get_num_threads()} threads; " if options.device == "cpu" else ""
    about = f"{here.gpu_name}, {platform.machine()}, {threads}{versions}; "
    about += f"commit {options.commit}; " if options.commit else ""
    about += f"python benchmarks/calibration_cost.py --device {options.device}"
    rows: list[list[object]] = []
    for name, make in models(options.device, options.layers).items():
        model, draw = make()
        for steps in STEPS:
            draw(steps)
            for number in range(1, options.rounds + 1):
                if time.perf_counter() - began < options.seconds:
                    row = calibrated(model, draw, steps, options.device == "cpu")
                    rows.append([name, steps, number, *row, about])
                    shown = rows[-1][:-1]
                    print(f"[{time.perf_counter() - began:6.1f}]", *shown, sep="  ", flush=True)
        write(options.out / HERE.name, rows, here.gpu_name)


def calibrated(model: object, draw: Draw, steps: int, emulated: bool) -> list[object]:
    """One calibration: the columns from `run_s` to `skipped`."""
    made = sagepatch.calibrate(model, run=lambda: draw(steps), emulate=emulated)
    own, spent = made.run_seconds, made.measuring_seconds
    return [
        *(f"{own:.3f}", f"{spent:.3f}", f"{spent / own:.2f}", f"{made.preparing_seconds:.2f}"),
        " ".join(str(row.step) for row in made.layers[0].rows),
        min(len(layer.names) for layer in made.layers),
        max(len(layer.unmeasured) for layer in made.layers),
    ]


def write(path: Path, rows: list[list[object]], device: str) -> None:
    """Rows of this device beside those of others that the file has."""
    old = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = [row for row in csv.DictReader(file) if not row["about"].startswith(device)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(old)
        writer.writerows(dict(zip(HEAD, row, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
