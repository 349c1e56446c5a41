"""How alike batches of pictures are: PSNR and SSIM as `sagepatch.report.pictures` defines them, for
many pictures at once on any device, and distances by the pipeline's own encoder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Wang et al., Image Quality Assessment, 2004.
WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
# Pictures at once.
BATCH = 64


def bytes_of(pictures: Tensor) -> Tensor:
    """Pictures in 0..1 as the bytes that a file would hold, [N, 3, H, W] uint8."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8)


def psnr_db(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each pair in dB, infinite for equal ones; uint8
    [N, 3, H, W].
    """
    error = (a.double() - b.double()).square().mean((1, 2, 3))
    return 10 * torch.log10(255**2 / error)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean structural similarity of each pair, uint8 [N, 3, H, W]; an 11 x 11 Gaussian window of
    sigma 1.5 where it lies wholly inside, mean over channels.
    """
    parts = zip(a.split(BATCH), b.split(BATCH), strict=True)
    return torch.cat([_ssim(x, y) for x, y in parts])


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    x, y = (t.double().flatten(0, 1).unsqueeze(1) for t in (a, b))
    position = torch.arange(WINDOW, dtype=torch.float64, device=a.device) - (WINDOW - 1) / 2
    weights = torch.exp(-(position**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()

    def blur(planes: Tensor) -> Tensor:
        once = F.conv2d(planes, weights[None, None, :, None])
        return F.conv2d(once, weights[None, None, None, :])

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    both = blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    structure = (2 * both + C2) / (var_x + var_y + C2)
    return (luminance * structure).mean((1, 2, 3)).view(a.shape[0], -1).mean(1)


@torch.inference_mode()
def features(vae: torch.nn.Module, pictures: Tensor) -> Tensor:
    """What the pipeline's own encoder sees in pictures, uint8 [N, 3, H, W]: the mean latents,
    [N, C, h, w] fp32.
    """
    dtype = next(vae.parameters()).dtype
    found = []
    for part in pictures.split(BATCH):
        scaled = part.to(dtype) / 127.5 - 1
        found.append(vae.encode(scaled).latent_dist.mean.float())
    return torch.cat(found)


def feature_distance(a: Tensor, b: Tensor, spread: float) -> Tensor:
    """RMS difference of two pictures' features over the spread of the features of all pictures, for
    each pair: 0 for equal ones, about 1.4 for unrelated ones.
    """
    return (a - b).square().mean((1, 2, 3)).sqrt() / spread


def pooled(a: Tensor) -> Tensor:
    """Features as numbers for a Frechet distance: each channel's mean over a grid of 4 x 4 parts,
    [N, C * 16] fp64.
    """
    return F.adaptive_avg_pool2d(a, 4).flatten(1).double()
