"""How far an attention output is from a reference: per head and whole, in double precision. No
thresholds here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metrics:
    """Distances of one output from its reference.

    `finite`: no NaN or Inf in the output. `cosine`: of the flattened tensors. `rel_l1`: sum |o - r|
    / sum |r|. `rmse`: in the units of the output. `sqnr_db`: 10 log10 of signal over noise power
    (inf for no noise). `max_abs`: largest difference. `norm_ratio`: |o| / |r|, which a cosine
    cannot see.
    """

    finite: bool
    cosine: float
    rel_l1: float
    rmse: float
    sqnr_db: float
    max_abs: float
    norm_ratio: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Metrics of a whole output and of each of its heads; `worst_head` has the lowest cosine, NaN
    lowest of all.
    """

    whole: Metrics
    heads: tuple[Metrics, ...]

    @property
    def worst_head(self) -> int:
        keys = [(h.finite, h.cosine) for h in self.heads]
        return keys.index(min(keys))

    @property
    def worst(self) -> Metrics:
        """Each metric at its worst over all heads, which may be different heads."""
        heads = self.heads
        return Metrics(
            finite=all(h.finite for h in heads),
            cosine=min(h.cosine for h in heads),
            rel_l1=max(h.rel_l1 for h in heads),
            rmse=max(h.rmse for h in heads),
            sqnr_db=min(h.sqnr_db for h in heads),
            max_abs=max(h.max_abs for h in heads),
            norm_ratio=max((h.norm_ratio for h in heads), key=lambda ratio: abs(ratio - 1)),
        )


def compare(out: Tensor, reference: Tensor) -> Comparison:
    """Compare out with reference, both [B, H, S, D], over batch, tokens and channels of each head.

    Two zero tensors are equal (cosine 1, ratio 1); a zero against a non-zero tensor has cosine 0.
    A non-finite output has cosine -1 and infinite errors, so that it is the worst wherever it is
    ranked.
    """
    o, r = (t.detach().transpose(0, 1).flatten(1).double() for t in (out, reference))  # [H, n]
    rows = torch.stack(
        [
            (o * r).sum(1),
            (o * o).sum(1),
            (r * r).sum(1),
            (o - r).abs().sum(1),
            r.abs().sum(1),
            ((o - r) ** 2).sum(1),
            (o - r).abs().amax(1) if o.shape[1] else o.sum(1),
        ]
    ).T.tolist()
    count = max(1, o.shape[1])
    heads = tuple(_metrics(row, count) for row in rows)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    sums[-1] = max((row[-1] for row in rows), default=0.0)
    return Comparison(_metrics(sums, count * max(1, len(rows))), heads)


def _metrics(row: list[float], count: int) -> Metrics:
    dot, out_power, ref_power, l1, ref_l1, noise, largest = row
    if not all(map(math.isfinite, (dot, out_power, l1, noise))):
        return Metrics(False, -1.0, math.inf, math.inf, -math.inf, math.inf, math.inf)
    both = math.sqrt(out_power * ref_power)
    silent = ref_power == 0
    same = noise == 0
    return Metrics(
        finite=True,
        # Rounding may take equal tensors a hair past 1.
        cosine=max(-1.0, min(1.0, dot / both)) if both > 0 else float(same),
        rel_l1=l1 / ref_l1 if ref_l1 > 0 else (0.0 if same else math.inf),
        rmse=math.sqrt(noise / count),
        sqnr_db=math.inf if same else (-math.inf if silent else 10 * math.log10(ref_power / noise)),
        max_abs=largest,
        norm_ratio=math.sqrt(out_power / ref_power) if not silent else (1.0 if same else math.inf),
    )
