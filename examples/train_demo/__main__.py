"""Holds the command that trains the demo pipeline from nothing to a measured folder."""

import argparse
import json
import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .autoencoder import encode_means, reconstruction_db, train_autoencoder
from .clock import Clock
from .evaluate import draw, load, score
from .export import export_pipeline
from .fast_blocks import choose_kernels
from .flow import Schedule, Shape, make_corpus, train_flow
from .models import IMAGE_SIZE, Sizes, make_autoencoder, make_networks
from .pictures import Picture, draw_pictures, list_pictures, read_images
from .prompts import known_wordings
from .sheet import save_sheet
from .tokenise import make_clip_tokenizer, make_word_tokenizer
from .warm import start_helpers

# Export and evaluation on a GPU, and a margin.
RESERVE_SECONDS = 45.0
OWN_PROMPTS = (
    "a red apple", "a blue apple", "a purple star", "a pink elephant", "a red frog",
    "please show me a rocket", "a painting of a cat", "kindly sketch us the green dog",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo pipeline.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.5, help="of the whole run")
    parser.add_argument("--autoencoder-seconds", type=float, default=70.0)
    parser.add_argument("--autoencoder", type=Path, help="use this trained one, train none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of small networks, on CPU")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def driver_version() -> str:
    """The NVIDIA driver's version, "none" where its tool is missing."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.split("\n")[0].strip() or "none"


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers were measured with."""
    import diffusers
    import transformers

    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    return {
        "gpu": gpu,
        "driver": driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
    }


def tiny_schedule() -> Schedule:
    """Shapes for a smoke test on a CPU."""
    return Schedule(
        low=(Shape(64, 32, 4, 0.5), Shape(64, 128, 4, 0.5)),
        full=(Shape(128, 32, 2, 0.5), Shape(128, 512, 2, 0.5)),
    )


def evaluate_all(
    folder: Path, out: Path, pictures: list[Picture], images: torch.Tensor, tiny: bool, clock: Clock
) -> list[dict[str, object]]:
    """Measure the folder's files on this device and draw two sheets."""
    device = images.device
    truth = images.cpu()
    pipeline = load(folder, str(device), torch.float32)
    batch = 2 if tiny else 64
    sample, drawn, pairs = score(
        pipeline, pictures, truth, "captions", 4 if tiny else 48, 8, 32, batch
    )
    save_sheet(out / "sheet.png", drawn, [prompt for _, prompt in pairs])
    own = draw(pipeline, list(OWN_PROMPTS), 8, 32, batch, 0)
    save_sheet(out / "own.png", own, list(OWN_PROMPTS))
    results = [asdict(sample)]
    clock.log(json.dumps(results[-1]))
    if device.type == "cuda":
        pipeline.to(torch.bfloat16)
    plans = [("captions", 0, 8, 32), ("captions", 192, 8, 512), ("painted", 256, 8, 32)]
    plans += [("wordings", 256, 8, 32), ("unknown-lead-in", 256, 8, 32)]
    plans += [("captions", 192, 8, 64), ("captions", 192, 8, 256), ("captions", 192, 1, 32)]
    for kind, count, steps, text_tokens in plans[1:3] if tiny else plans:
        count = 2 if tiny else count
        result, _, _ = score(pipeline, pictures, truth, kind, count, steps, text_tokens, batch)
        results.append(asdict(result))
        clock.log(json.dumps(results[-1]))
    return results


def _autoencoder(args: argparse.Namespace, images: torch.Tensor, clock: Clock) -> tuple[Any, int]:
    """The trained autoencoder with its latents' scale and shift, and the steps it took."""
    if args.autoencoder:
        from diffusers import AutoencoderKL

        return AutoencoderKL.from_pretrained(args.autoencoder).float().to(images.device), 0
    autoencoder = make_autoencoder((16, 16) if args.tiny else (32, 64)).to(images.device)
    seconds = 5.0 if args.tiny else args.autoencoder_seconds
    steps = train_autoencoder(autoencoder, images, 4 if args.tiny else 96, seconds, clock)
    latents = encode_means(autoencoder, images, IMAGE_SIZE)
    autoencoder.register_to_config(
        scaling_factor=1 / float(latents.std()), shift_factor=float(latents.mean())
    )
    return autoencoder, steps


def compile_chains(schedule: Schedule) -> list[list[str]]:
    """The shapes' names in three lists, one a helper, the soonest needed first."""
    low, full = ([shape.name for shape in shapes] for shapes in (schedule.low, schedule.full))
    return [low[::2], low[1:2] + full[2:], full[:2]]


def main() -> None:
    """Train, export, evaluate."""
    args = parse()
    clock = Clock()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(1, 1, 2) if args.tiny else Sizes()
    schedule = tiny_schedule() if args.tiny else Schedule()
    ready = args.out / "ready"
    helpers = [] if args.no_compile else start_helpers(ready, compile_chains(schedule), sizes)
    facts = {"versions": versions(device)}
    clock.log(json.dumps(facts))

    pictures = list_pictures(24 if args.tiny else None)
    images = draw_pictures(read_images(device), pictures)
    captions = [caption for picture in pictures for caption in picture.captions]
    texts = captions + known_wordings()
    clip_tokenizer, word_tokenizer = make_clip_tokenizer(texts), make_word_tokenizer(texts)
    clock.log(f"{len(pictures)} pictures, {len(captions)} captions")

    autoencoder, steps = _autoencoder(args, images, clock)
    shift, scale = autoencoder.config.shift_factor, autoencoder.config.scaling_factor
    quality = reconstruction_db(autoencoder, images[:128])
    clock.log(f"autoencoder: {steps} steps, {quality:.2f} dB, scale {scale:.4f} shift {shift:.4f}")
    latents = encode_means(autoencoder, images, IMAGE_SIZE)
    small = encode_means(autoencoder, images, IMAGE_SIZE // 2)
    sides = {IMAGE_SIZE: (latents - shift) * scale, IMAGE_SIZE // 2: (small - shift) * scale}

    networks = make_networks(sizes, clip_tokenizer, word_tokenizer, device)
    counts = [sum(p.numel() for p in module.parameters()) for module in networks.modules()]
    corpus = make_corpus(pictures, sides, clip_tokenizer, word_tokenizer, args.seed)
    clock.log(f"parameters {counts}, {len(corpus.clip_ids)} wordings")
    seconds = 30.0 if args.tiny else 60 * args.minutes - RESERVE_SECONDS - clock.seconds()

    def is_ready(shape: Shape) -> bool:
        return (ready / shape.name).exists()

    done = train_flow(networks, corpus, schedule, seconds, is_ready, clock, args.seed)
    for helper in helpers:
        helper.terminate()
    clock.log(f"trained: {done}")
    folder = args.out / "pipeline"
    size = export_pipeline(folder, networks, autoencoder, clip_tokenizer, word_tokenizer)
    clock.log(f"exported {size:,} bytes")
    results = evaluate_all(folder, args.out, pictures, images, args.tiny, clock)
    report = {
        **facts,
        "parameters": counts,
        "autoencoder": {"steps": steps, "psnr_db": quality},
        "flow": {**done, "seconds": seconds},
        "bytes": size,
        "results": results,
        "seconds": clock.seconds(),
    }
    if device.type == "cuda":
        report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    clock.log("done")


if __name__ == "__main__":
    main()
