"""`emulate`: what any `Recipe` computes, in plain torch on any device, rounding where the hardware
rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sagepatch.numerics import quantize, smooth
from sagepatch.numerics.exact import SCORE_BUDGET, exact, members
from sagepatch.numerics.masks import merged_mask, seen_keys
from sagepatch.numerics.recipe import MMA_K, Recipe
from sagepatch.spec import Call

__all__ = ["emulate", "exact", "merged_mask"]

LOG2E = math.log2(math.e)
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def emulate(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Compute `recipe` on `call`: output [B, Hq, Sq, Dv] fp32, natural log-sum-exp [B, Hq, Sq]
    fp32.

    Follows docs/numerics.md section 3. Softmax runs online over tiles of `recipe.k_block` keys;
    FP16 accumulators are rounded after every MMA and flushed to FP32 every `recipe.depth` MMAs. The
    tiles of one row are computed
    side by side: tile j's probabilities are relative to the running maximum up to tile j, as in the
        loop.
    """
    if recipe.exact:
        return exact(call)
    if call.packed:
        parts = [emulate(member, recipe) for member in members(call)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    B, Hq, Sq, _ = call.q.shape
    Skv, Dv = call.v.shape[2], call.v.shape[3]
    if Skv == 0 or Sq == 0:
        return exact(call)
    prepared = _prepare(call, recipe)
    per_row = B * Hq * Skv * max(1, Dv // MMA_K[recipe.pv] if recipe.accumulate == "fp16" else 1)
    rows = max(1, SCORE_BUDGET // 4 // per_row)
    tiles = [
        _rows(call, recipe, prepared, start, min(start + rows, Sq)) for start in range(0, Sq, rows)
    ]
    return torch.cat([out for out, _ in tiles], 2), torch.cat([lse for _, lse in tiles], 2)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the pre-pass leaves: codes and scales of Q, K, V, padded to whole tiles of keys."""

    q_codes: Tensor  # [B, Hq, Sq, D]
    q_scale_log2: Tensor  # [B, Hq, Sq, 1], carries scale * log2(e)
    k_codes: Tensor  # [B, Hkv, Skp, D], zeros past Skv
    k_scale: Tensor  # [B, Hkv, 1, Skp]
    v_codes: Tensor  # [B, Hkv, Skp, Dv]
    v_scale: Tensor  # [B, Hkv, 1, Dv]
    v_mean: Tensor | None  # [B, Hkv, 1, Dv]
    q_mean_log2: Tensor | None  # [B, Hq, Sq, D], mean of the query block times scale * log2(e)
    k_smooth: Tensor | None  # [B, Hkv, Skp, D], what q_mean multiplies
    # What smoothing K took from each row's scores: scale * log2(e) * q . k_mean.
    shift: Tensor  # [B, Hq, Sq, 1]
    hidden: Tensor | None  # [B, 1, 1, Skp] bool, keys that nobody sees, the pad keys among them


def _prepare(call: Call, recipe: Recipe) -> _Prepared:
    q, k, v = call.q.float(), call.k.float(), call.v.float()
    Skv = k.shape[2]
    seen = seen_keys(call)
    if seen is not None:
        keep = seen[:, None, :, None]
        k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
    k_mean = smooth.masked_mean(k, seen) if recipe.smooth_k else torch.zeros_like(k[:, :, :1])
    group = q.shape[1] // k.shape[1]
    factor = call.scale * LOG2E
    shift = (q * k_mean.repeat_interleave(group, 1)).sum(3, keepdim=True) * factor
    k = k - k_mean
    v_mean = smooth.masked_mean(v, seen) if recipe.smooth_v else None
    v = v if v_mean is None else v - v_mean
    if seen is not None:
        k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
    if recipe.rotate:
        q, k = smooth.rotate(q), smooth.rotate(k)
    q_mean = smooth.block_mean(q, recipe.q_block) if recipe.smooth_q else None
    q = q if q_mean is None else q - q_mean
    device = q.device
    q_groups = quantize.query_groups(q.shape[2], recipe.q_granularity, recipe.q_block, device)
    k_groups = quantize.key_groups(Skv, recipe.k_granularity, recipe.k_block, device)
    q8 = quantize.to_integer(q, q_groups, recipe.qk_max)
    k8 = quantize.to_integer(k, k_groups, recipe.qk_max)
    v8 = _quantise_v(v, recipe)
    pad = -Skv % recipe.k_block
    hidden = None
    if seen is not None or pad:
        visible = torch.ones(1, Skv, dtype=torch.bool, device=device) if seen is None else seen
        hidden = ~F.pad(visible, (0, pad))[:, None, None, :]
    return _Prepared(
        q_codes=q8.codes,
        q_scale_log2=q8.scale * factor,
        k_codes=F.pad(k8.codes, (0, 0, 0, pad)),
        k_scale=F.pad(k8.scale, (0, 0, 0, pad)).mT,
        v_codes=F.pad(v8.codes, (0, 0, 0, pad)),
        v_scale=v8.scale,
        v_mean=v_mean,
        q_mean_log2=None if q_mean is None else q_mean * factor,
        k_smooth=None if q_mean is None else F.pad(k, (0, 0, 0, pad)),
        shift=shift,
        hidden=hidden,
    )


def _quantise_v(v: Tensor, recipe: Recipe) -> quantize.Quantised:
    if recipe.pv == "int8":
        return quantize.to_integer_per_channel(v, quantize_max(recipe))
    if recipe.pv == "fp16":
        return quantize.to_float16_per_channel(v, recipe.v_range)
    return quantize.to_float8_per_channel(v, recipe.v_range, FLOAT8[recipe.pv])


def quantize_max(recipe: Recipe) -> int:
    """Largest integer code of V of an INT8 recipe."""
    return int(recipe.v_range)


def _rows(
    call: Call, recipe: Recipe, ready: _Prepared, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    scores = _scores(call, recipe, ready, start, stop)  # [B, Hq, rows, Skp], base 2
    B, Hq, rows, Skp = scores.shape
    tiles = Skp // recipe.k_block
    tiled = scores.view(B, Hq, rows, tiles, recipe.k_block)
    running = tiled.amax(4).cummax(3).values  # [B, Hq, rows, tiles]
    last = running[..., -1:]
    base = torch.where(running == -torch.inf, 0.0, running)
    p = torch.exp2(tiled - base.unsqueeze(4))
    codes = _quantise_p(p, recipe)
    decay = torch.exp2(running - torch.where(last == -torch.inf, 0.0, last))
    summed = codes / recipe.p_range if recipe.sum_quantised_p else p
    total = (summed.sum(4) * decay).sum(3, keepdim=True)  # [B, Hq, rows, 1]
    weighted = _weighted_values(codes, decay, ready.v_codes, recipe)  # [B, Hq, rows, Dv]
    group = Hq // ready.v_codes.shape[1]
    v_scale = ready.v_scale.repeat_interleave(group, 1)
    out = weighted / recipe.p_range * v_scale
    keeps_shift = call.softcap is None and call.sinks is None
    if call.sinks is not None:
        sink = call.sinks.float().view(1, Hq, 1, 1) * LOG2E
        top = torch.maximum(last, sink)
        rescale = torch.exp2(last - top)
        out, total, last = out * rescale, total * rescale, top
        denominator = total + torch.exp2(sink - top)
    else:
        denominator = total
    empty = denominator == 0
    out = torch.where(empty, 0.0, out / torch.where(empty, 1.0, denominator))
    if ready.v_mean is not None:
        weight = torch.where(empty, 0.0, total / torch.where(empty, 1.0, denominator))
        out = out + weight * ready.v_mean.repeat_interleave(group, 1)
    lse = last + torch.log2(denominator)
    if keeps_shift:
        lse = lse + ready.shift[:, :, start:stop]
    return out, (lse / LOG2E).squeeze(3)


def _scores(call: Call, recipe: Recipe, ready: _Prepared, start: int, stop: int) -> Tensor:
    """Scores of query rows start to stop in base 2, hidden keys at -inf; [B, Hq, rows, Skp]."""
    q_codes = ready.q_codes[:, :, start:stop]
    B, Hq, rows, D = q_codes.shape
    Hkv, Skp = ready.k_codes.shape[1], ready.k_codes.shape[2]
    group = Hq // Hkv
    products = q_codes.reshape(B, Hkv, group * rows, D) @ ready.k_codes.mT
    products = products.view(B, Hq, rows, Skp)
    scores = products * ready.q_scale_log2[:, :, start:stop]
    scores = scores * ready.k_scale.repeat_interleave(group, 1)
    if ready.q_mean_log2 is not None and ready.k_smooth is not None:
        means = ready.q_mean_log2[:, :, start:stop].reshape(B, Hkv, group * rows, D)
        scores = scores + (means @ ready.k_smooth.mT).view(B, Hq, rows, Skp)
    if call.softcap is not None or call.sinks is not None:
        # Neither a soft cap nor a sink is shift-invariant: give back what smoothing K took.
        scores = scores + ready.shift[:, :, start:stop]
    if call.softcap is not None:
        cap = call.softcap * LOG2E
        scores = cap * torch.tanh(scores / cap)
    lowest, highest = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    mask = merged_mask(call, start, stop)
    if mask is not None and mask.dtype != torch.bool:
        bias = F.pad(mask.float(), (0, Skp - mask.shape[-1]) if mask.shape[-1] > 1 else (0, 0))
        hides = bias == -torch.inf
        # finfo.min times log2(e) would overflow to -inf, and a row of them must stay the mean of V.
        scores = scores + (bias * LOG2E).clamp(min=lowest)
        scores = scores.clamp(lowest, highest).masked_fill(hides, -torch.inf)
    else:
        scores = scores.clamp(lowest, highest)
        if mask is not None:
            pad = (0, Skp - mask.shape[-1]) if mask.shape[-1] > 1 else (0, 0)
            scores = scores.masked_fill(~F.pad(mask, pad), -torch.inf)
    return scores if ready.hidden is None else scores.masked_fill(ready.hidden, -torch.inf)


def _quantise_p(p: Tensor, recipe: Recipe) -> Tensor:
    if recipe.pv == "int8":
        return torch.round(p * recipe.p_range)
    if recipe.pv == "fp16":
        return quantize.round_to(p, torch.float16)
    return quantize.round_to(p * recipe.p_range, FLOAT8[recipe.pv])


def _weighted_values(codes: Tensor, decay: Tensor, v_codes: Tensor, recipe: Recipe) -> Tensor:
    """Sum of codes times v_codes, each tile decayed to the last maximum; [B, Hq, rows, Dv]."""
    B, Hq, rows, tiles, width = codes.shape
    Hkv, Skp, Dv = v_codes.shape[1], v_codes.shape[2], v_codes.shape[3]
    group = Hq // Hkv
    if recipe.depth is None:
        flat = (codes * decay.unsqueeze(4)).view(B, Hkv, group * rows, Skp)
        return (flat @ v_codes).view(B, Hq, rows, Dv)
    k = MMA_K[recipe.pv]
    mmas = Skp // k
    operand = codes.view(B, Hkv, group * rows, mmas, k).transpose(2, 3)
    partial = operand @ v_codes.view(B, Hkv, mmas, k, Dv)  # [B, Hkv, mmas, G * rows, Dv]
    partial = partial.view(B, Hkv, mmas // recipe.depth, recipe.depth, group * rows, Dv)
    half = partial[:, :, :, 0].to(torch.float16)
    for step in range(1, recipe.depth):
        half = (half.float() + partial[:, :, :, step]).to(torch.float16)
    flushes_per_tile = width // (k * recipe.depth)
    weights = decay.reshape(B, Hkv, group * rows, tiles).permute(0, 1, 3, 2)
    weights = weights.repeat_interleave(flushes_per_tile, 2).unsqueeze(4)
    return (half.float() * weights).sum(2).view(B, Hq, rows, Dv)
