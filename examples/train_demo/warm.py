"""Holds the helper processes that compile the training steps ahead into the cache on disk."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from .fast_blocks import CompileSwitch, choose_kernels, prepare
from .flow import Batch, Corpus, Shape, image_ids, make_batch, velocity_error
from .models import Networks, Sizes, make_networks

# A shape's compiled gradients may differ from the plain ones by bfloat16 rounding only.
WORST_GRADIENT_ERROR = 0.05
# Three helpers and the training share one GPU; a helper must not take the training's memory.
MEMORY_PART = 0.25


def start_helpers(folder: Path, chains: list[list[str]], sizes: Sizes) -> list[subprocess.Popen]:
    """One process for each chain of shape names; a name proved to work appears as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    helpers = []
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    size_text = f"{sizes.heads},{sizes.double_blocks},{sizes.single_blocks}"
    for chain in chains:
        command = [sys.executable, "-m", __spec__.name, str(folder), size_text, *chain]
        helpers.append(subprocess.Popen(command, env=environment))
    return helpers


class _Tokenizer:
    """Stands for a tokenizer where only sizes matter."""

    model_max_length, bos_token_id, eos_token_id, pad_token_id = 64, 0, 1, 1

    def __len__(self) -> int:
        return 100


def _random_corpus(side: int, device: torch.device) -> Corpus:
    pictures = 8
    return Corpus(
        latents={side: torch.randn(pictures, (side // 4) ** 2, 16, device=device).bfloat16()},
        plain=4,
        clip_ids=torch.randint(2, 100, (pictures, 64), device=device).index_fill_(
            1, torch.tensor([63], device=device), 1
        ),
        t5_ids=torch.randint(2, 100, (pictures, 32), device=device),
        first=torch.arange(pictures, device=device),
        count=torch.ones(pictures, dtype=torch.long, device=device),
        ids={side: image_ids(side, 128, device)},
    )


def _gradients(networks: Networks, batch: Batch, positions: Tensor, chunk: int) -> Tensor:
    """Gradient of the mean error in all the denoiser's parameters, summed over chunks of rows."""
    rows = len(batch.time)
    for module in networks.modules():
        module.zero_grad(set_to_none=True)
    for start in range(0, rows, chunk):
        part = batch.rows(start, start + chunk)
        (velocity_error(networks, part, positions).sum() / rows).backward()
    grads = [p.grad.flatten() for p in networks.transformer.parameters() if p.grad is not None]
    return torch.cat(grads)


def prove(shape: Shape, sizes: Sizes, device: torch.device) -> float:
    """Relative error of the compiled gradients against the plain ones, at the shape's batch."""
    torch.manual_seed(0)
    networks = make_networks(sizes, _Tokenizer(), _Tokenizer(), device)
    for parameter in networks.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    prepare(networks.transformer)
    switch = CompileSwitch(networks.transformer)
    corpus = _random_corpus(shape.side, device)
    batch, positions = make_batch(corpus, shape, shape.batch), corpus.ids[shape.side]
    switch.set(True)
    for _ in range(3):
        found = _gradients(networks, batch, positions, shape.batch)
    switch.set(False)
    expected = _gradients(networks, batch, positions, max(1, shape.batch // 16))
    return float((found - expected).norm() / expected.norm())


def main(folder: str, sizes: str, *names: str) -> None:
    """Compile and prove each named shape in turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY_PART)
    heads, double, single = (int(n) for n in sizes.split(","))
    for name in names:
        side, text, batch = (int(part) for part in name.split("-"))
        error = prove(Shape(side, text, batch, 1.0), Sizes(heads, double, single), device)
        print(f"warm {name}: gradient error {error:.2e}", flush=True)
        if error < WORST_GRADIENT_ERROR:
            (Path(folder) / name).touch()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
