"""Holds the Muon optimiser for hidden matrices; knows nothing of the networks.

Momentum orthogonalised by Newton-Schulz steps: Jordan et al., https://kellerjordan.github.io/posts/muon/;
the update's scale follows Liu et al., arXiv 2502.16982.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
UPDATE_RMS = 0.2


def orthogonalise(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T: [N, R, C] in, bfloat16 [N, R, C] out."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon over matrices, batched by shape; the caller sets `rate` before each step."""

    def __init__(self, matrices: list[nn.Parameter], rate: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device)
            for group in self.groups
        ]
        self.rate = rate

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients; a matrix without a gradient counts as zero gradient."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([torch.zeros_like(m) if m.grad is None else m.grad for m in group])
            momentum.lerp_(grads, 1 - MOMENTUM)
            update = orthogonalise(grads.lerp(momentum, MOMENTUM)).float()
            scale = self.rate * UPDATE_RMS * max(group[0].shape) ** 0.5
            torch._foreach_mul_(group, 1 - self.rate * WEIGHT_DECAY)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-scale)
