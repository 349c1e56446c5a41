"""Holds the measuring of a finished pipeline: recall by the nearest picture, PSNR and a sheet.

Run it as `python -m examples.train_demo.evaluate FOLDER`.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .pictures import Picture, draw_pictures, list_pictures, read_images
from .prompts import strange_word, wording
from .sheet import save_sheet

KINDS = ("captions", "painted", "wordings", "unknown-lead-in")


@dataclass(frozen=True)
class Score:
    """How many of the drawings have their own picture as the nearest, and how close they come."""

    kind: str
    steps: int
    text_tokens: int
    right: int
    count: int
    psnr_mean_db: float
    psnr_worst_db: float
    seconds_per_picture: float


@torch.no_grad()
def draw(
    pipeline: Any, prompts: list[str], steps: int, text_tokens: int, batch: int, seed: int
) -> Tensor:
    """Pictures of the prompts, float32 [N, 3, 128, 128] in 0..1 on the CPU."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for start in range(0, len(prompts), batch):
        out = pipeline(
            prompts[start : start + batch],
            height=128,
            width=128,
            num_inference_steps=steps,
            max_sequence_length=text_tokens,
            guidance_scale=0.0,
            generator=torch.Generator().manual_seed(seed + start),
            output_type="pt",
        )
        drawn.append(out.images.float().cpu())
    return torch.cat(drawn)


def thumbnails(images: Tensor) -> Tensor:
    """uint8 or 0..1 pictures as rows of their 64x64 versions, float32 [N, 12288] in 0..1."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    return F.interpolate(x, (64, 64), mode="area").flatten(1)


def nearest(images: Tensor, references: Tensor) -> Tensor:
    """Index of the reference nearest in pixels at 64x64 to each image: [N]."""
    return torch.cdist(thumbnails(images), thumbnails(references)).argmin(1)


def psnr_db(images: Tensor, truth: Tensor) -> Tensor:
    """PSNR of 0..1 images against uint8 truth: [N]."""
    return -10 * (images - truth.float() / 255).square().mean((1, 2, 3)).log10()


def choose(kind: str, pictures: list[Picture], count: int, seed: int) -> list[tuple[int, str]]:
    """(index of the picture, prompt) pairs of the kind asked for; count 0 means all."""
    rng = random.Random(seed)
    wanted = [i for i, p in enumerate(pictures) if p.repainted == (kind == "painted")]
    chosen = rng.sample(wanted, count) if 0 < count < len(wanted) else wanted
    pairs = []
    for index in chosen:
        prompt = rng.choice(pictures[index].captions) if count else pictures[index].captions[0]
        if kind == "wordings":
            prompt = wording(pictures[index], rng)
        if kind == "unknown-lead-in":
            prompt = " ".join(strange_word(rng) for _ in range(3)) + f" {prompt}"
        pairs.append((index, prompt))
    return pairs


def score(
    pipeline: Any,
    pictures: list[Picture],
    truth: Tensor,
    kind: str,
    count: int,
    steps: int,
    text_tokens: int,
    batch: int,
    seed: int = 0,
) -> tuple[Score, Tensor, list[tuple[int, str]]]:
    """Draw pictures of one kind and compare each with all pictures of the training."""
    pairs = choose(kind, pictures, count, seed)
    began = time.perf_counter()
    drawn = draw(pipeline, [prompt for _, prompt in pairs], steps, text_tokens, batch, seed)
    seconds = time.perf_counter() - began
    index = torch.tensor([i for i, _ in pairs])
    plain = sum(not picture.repainted for picture in pictures)
    found = nearest(drawn, truth if kind == "painted" else truth[:plain])
    psnr = psnr_db(drawn, truth[index])
    result = Score(
        kind=kind,
        steps=steps,
        text_tokens=text_tokens,
        right=int((found == index).sum()),
        count=len(pairs),
        psnr_mean_db=round(float(psnr.mean()), 2),
        psnr_worst_db=round(float(psnr.min()), 2),
        seconds_per_picture=round(seconds / len(pairs), 3),
    )
    return result, drawn, pairs


def load(folder: Path, device: str, dtype: torch.dtype) -> Any:
    """The pipeline of a folder."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return pipeline.to(device)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a trained demo pipeline.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="captions")
    parser.add_argument("--count", type=int, default=48, help="pictures; 0 draws all of the kind")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sheet", type=Path, help="write the drawings as one PNG")
    args = parser.parse_args()
    pictures = list_pictures()
    truth = draw_pictures(read_images(), pictures)
    pipeline = load(args.folder, args.device, torch.float32)
    result, drawn, pairs = score(
        pipeline,
        pictures,
        truth,
        args.kind,
        args.count,
        args.steps,
        args.text_tokens,
        args.batch,
        args.seed,
    )
    print(json.dumps(asdict(result)))
    if args.sheet:
        save_sheet(args.sheet, drawn, [prompt for _, prompt in pairs])


if __name__ == "__main__":
    main()
