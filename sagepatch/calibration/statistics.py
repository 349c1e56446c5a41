"""What the inputs of a call look like, a number a head: the reasons why quantising is easy or hard.

Memory stays flat however long the call: a few heads at a time, and P of a few rows only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sagepatch.calibration.pieces import rows_of
from sagepatch.calibration.sample import Statistics
from sagepatch.numerics.exact import members
from sagepatch.numerics.masks import merged_mask
from sagepatch.spec import Call

# P is computed for ENTROPY_RUNS stretches of ENTROPY_ROWS rows, evenly spaced: enough for a mean.
ENTROPY_RUNS = 16
ENTROPY_ROWS = 4
# The most numbers that are held in FP32 at once.
NUMBERS = 1 << 24


def statistics(call: Call) -> Statistics:
    """The statistics of one call; see `Statistics` for what each means. Not-a-numbers stay what
    they are.
    """
    return Statistics(
        _by_heads(call.k, _offset),
        _by_heads(call.q, _outlier),
        _by_heads(call.v, lambda x: x.abs().amax((0, 2, 3))),
        _entropies(call),
    )


def _by_heads(x: Tensor, of: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
    """A number a head of x [B, H, S, D], a few heads at a time."""
    B, H, S, D = x.shape
    if x.numel() == 0:
        return (0.0,) * H
    group = max(1, NUMBERS // (B * S * D))
    parts = [of(x[:, at : at + group].float()) for at in range(0, H, group)]
    return tuple(torch.cat(parts).tolist())


def _offset(k: Tensor) -> Tensor:
    """The largest channel mean over the spread around the means, worst batch member, [H]."""
    mean = k.mean(2, keepdim=True)
    spread = (k - mean).square().mean((2, 3)).sqrt()  # [B, H]
    largest = mean.abs().amax((2, 3))
    return (largest / spread.clamp(min=torch.finfo(torch.float32).tiny)).amax(0)


def _outlier(q: Tensor) -> Tensor:
    """The largest magnitude over the root mean square, worst batch member, [H]."""
    rms = q.square().mean((2, 3)).sqrt()
    return (q.abs().amax((2, 3)) / rms.clamp(min=torch.finfo(torch.float32).tiny)).amax(0)


def _entropies(call: Call) -> tuple[float, ...]:
    """The mean over sampled rows of the entropy of P over that of an even spread, a head."""
    if call.packed:
        return _entropies(max(members(call), key=lambda one: one.q.shape[2] * one.k.shape[2]))
    Hq, Sq = call.q.shape[1], call.q.shape[2]
    if 0 in (call.q.shape[0], Sq, call.k.shape[2]):
        return (0.0,) * Hq
    starts = sorted(
        {run * max(0, Sq - ENTROPY_ROWS) // ENTROPY_RUNS for run in range(ENTROPY_RUNS)}
    )
    few = rows_of(call, [(start, min(start + ENTROPY_ROWS, Sq)) for start in starts])
    return tuple(_row_entropies(few).mean((0, 2)).tolist())


def _row_entropies(call: Call) -> Tensor:
    """Entropy of every row of P over log(keys seen), [B, Hq, Sq]; 0 where a row sees one key or
    none.
    """
    B, Hq, Sq, D = call.q.shape
    Hkv, Skv = call.k.shape[1], call.k.shape[2]
    width = Hq // Hkv
    group = max(1, NUMBERS // max(1, B * Skv * (D + width * Sq)))
    mask = merged_mask(call)
    full = None if mask is None else mask.expand(B, Hq, Sq, Skv)
    found = []
    for at in range(0, Hkv, group):
        k = call.k[:, at : at + group].float()
        heads = slice(at * width, (at + k.shape[1]) * width)
        stacked = call.q[:, heads].float().reshape(B, k.shape[1], width * Sq, D)
        scores = (stacked @ k.mT).view(B, -1, Sq, Skv) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        seen = torch.tensor(float(Skv), device=scores.device)
        if full is not None:
            part = full[:, heads]
            hidden = ~part if part.dtype == torch.bool else part == -torch.inf
            scores = scores if part.dtype == torch.bool else scores + part.float()
            scores = scores.masked_fill(hidden, -torch.inf)
            seen = (~hidden).sum(-1).float()
        p = torch.softmax(scores, -1)
        entropy = torch.special.entr(p).sum(-1)
        found.append(torch.where(seen > 1, entropy / torch.log(seen.clamp(min=2)), 0.0))
    return torch.cat(found, 1)
