"""Holds the training of the autoencoder and the encoding of pictures; knows nothing of captions."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .clock import Clock

RATE, BETAS = 2e-3, (0.9, 0.99)
WARM_UP_STEPS = 50
KL_WEIGHT = 1e-4
# The decoder meets latents that the flow model got slightly wrong: train it on such.
LATENT_NOISE = 0.1


def half_precision(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 autocast on a GPU, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _pick(images: Tensor, batch: int) -> Tensor:
    """A random batch in -1..1, some pictures flipped, some with colour channels swapped."""
    index = torch.randint(len(images), (batch,), device=images.device)
    x = images[index].float() / 127.5 - 1
    flip = torch.rand(batch, device=x.device) < 0.3
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    swap = torch.rand(batch, device=x.device) < 0.3
    order = torch.rand(batch, 3, device=x.device).argsort(1)
    order = torch.where(swap[:, None], order, torch.arange(3, device=x.device))
    return x.gather(1, order[:, :, None, None].expand_as(x))


def _loss(decoded: Tensor, x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    decoded = decoded.float()
    edges = [F.l1_loss(decoded.diff(dim=dim), x.diff(dim=dim)) for dim in (2, 3)]
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    pixels = F.l1_loss(decoded, x) + 2 * F.mse_loss(decoded, x)
    return pixels + 0.5 * (edges[0] + edges[1]) + KL_WEIGHT * divergence


def train_autoencoder(
    autoencoder: Any, images: Tensor, batch: int, seconds: float, clock: Clock
) -> int:
    """Train on uint8 images [N, 3, H, W] for the time given; the number of steps done."""
    device = images.device
    autoencoder.train().to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(autoencoder.parameters(), RATE, BETAS, weight_decay=0.0)
    began, step = clock.seconds(), 0
    while (progress := (clock.seconds() - began) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - progress)
        x = _pick(images, batch).contiguous(memory_format=torch.channels_last)
        with half_precision(device):
            posterior = autoencoder.encode(x).latent_dist
            mean, log_variance = posterior.mean.float(), posterior.logvar.float()
            spread = mean.detach().std()
            latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            latents = latents + torch.randn_like(mean) * LATENT_NOISE * spread
            decoded = autoencoder.decode(latents).sample
        loss = _loss(decoded, x, mean, log_variance)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimiser.step()
        if step % 200 == 0:
            clock.log(f"autoencoder step {step} loss {loss.item():.4f}")
        step += 1
    autoencoder.eval().to(memory_format=torch.contiguous_format)
    return step


@torch.no_grad()
def encode_means(autoencoder: Any, images: Tensor, side: int, chunk: int = 256) -> Tensor:
    """Latent means of uint8 images shrunk to side: float32 [N, 4, side / 2, side / 2]."""
    means = []
    for part in images.split(chunk):
        x = part.float() / 127.5 - 1
        if side != x.shape[-1]:
            x = F.interpolate(x, (side, side), mode="area")
        means.append(autoencoder.encode(x).latent_dist.mean.float())
    return torch.cat(means)


@torch.no_grad()
def reconstruction_db(autoencoder: Any, images: Tensor) -> float:
    """Mean PSNR in dB of encoding and decoding uint8 images."""
    decoded = autoencoder.decode(encode_means(autoencoder, images, images.shape[-1])).sample
    error = (decoded.clamp(-1, 1) / 2 + 0.5 - images.float() / 255).square().mean((1, 2, 3))
    return float((-10 * error.log10()).mean())
