"""Quantised attention once more, row by row and key tile by key tile, as the documents word it:
slow, in double precision where nothing is to be rounded, and sharing no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import numpy as np
import torch

from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

LOG2E = 1 / math.log(2)
MMA_KEYS = {"fp16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32, "int8": 32}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def q_group(row: int, recipe: Recipe) -> Hashable:
    """Rows that share a scale have equal values."""
    return {
        "token": row,
        "block": row // recipe.q_block,
        "thread": (row // 32, row % 8),
        "tensor": 0,
    }[recipe.q_granularity]


def k_group(key: int, recipe: Recipe) -> Hashable:
    return {
        "token": key,
        "block": key // recipe.k_block,
        "thread": (key // 64, key % 8 // 2),
        "tensor": 0,
    }[recipe.k_granularity]


def integer_rows(
    x: torch.Tensor, group: Callable[[int], Hashable], largest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [S, D] and scales [S] of x [S, D] fp32."""
    peak: dict[Hashable, torch.Tensor] = {}
    for row in range(len(x)):
        key = group(row)
        peak[key] = torch.maximum(peak.get(key, torch.tensor(0.0)), x[row].abs().max())
    amax = torch.stack([peak[group(row)] for row in range(len(x))])
    inverse = torch.where(amax > 0, largest / amax, 0.0)
    return torch.round(x * inverse[:, None]).double(), (amax / largest).double()


def value_channels(v: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [S, Dv] and scales [Dv] of v [S, Dv] fp32."""
    amax = v.abs().amax(0)
    if recipe.pv == "fp16":
        powers = [
            2.0 ** max(0, math.ceil(math.log2(a / recipe.v_range))) if a > 0 else 1.0
            for a in amax.tolist()
        ]
        scale = torch.tensor(powers)
        return (v / scale).half().double(), scale.double()
    if recipe.pv == "bf16":
        return v.bfloat16().double(), torch.ones_like(amax).double()
    x = v * torch.where(amax > 0, recipe.v_range / amax, 0.0)
    codes = torch.round(x) if recipe.pv == "int8" else x.to(FLOAT8[recipe.pv]).float()
    return codes.double(), (amax / recipe.v_range).double()


def probability_codes(p: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    x = p.float() * recipe.p_range
    if recipe.pv == "fp16":
        return x.half().double()
    if recipe.pv == "bf16":
        return x.bfloat16().double()
    return (torch.round(x) if recipe.pv == "int8" else x.to(FLOAT8[recipe.pv]).float()).double()


def tile_times_values(codes: torch.Tensor, values: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """codes [keys] times values [keys, Dv] through the recipe's accumulator."""
    if recipe.depth is None:
        return codes @ values
    k, total = MMA_KEYS[recipe.pv], torch.zeros(values.shape[1], dtype=torch.float64)
    for flush in range(0, len(codes), k * recipe.depth):
        half = np.zeros(values.shape[1], dtype=np.float16)
        for at in range(flush, min(flush + k * recipe.depth, len(codes)), k):
            summed = (codes[at : at + k, None] * values[at : at + k]).sum(0)
            half = (half.astype(np.float64) + summed.numpy()).astype(np.float16)
        total += torch.from_numpy(half.astype(np.float64))
    return total


def added_log2(call: Call, b: int, h: int) -> torch.Tensor:
    """What masks add to the scores in base 2, [Sq, Skv]: 0, a bias, or -inf."""
    Sq, Skv = call.q.shape[2], call.k.shape[2]
    added = torch.zeros(Sq, Skv, dtype=torch.float64)
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(call.q.shape[0], call.q.shape[1], Sq, Skv)[b, h]
        if mask.dtype == torch.bool:
            added[~mask] = -math.inf
        else:
            added = (mask.double() * LOG2E).clamp(min=torch.finfo(torch.float32).min)
            added[mask == -math.inf] = -math.inf
    if call.causal_offset is not None:
        for i in range(Sq):
            for j in range(Skv):
                newest = i + call.causal_offset
                oldest = -math.inf if call.window is None else newest - call.window + 1
                if not oldest <= j <= newest:
                    added[i, j] = -math.inf
    return added


def attention_by_the_book(call: Call, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hq, Sq, Dv] and natural log-sum-exp [B, Hq, Sq] in fp64. No rotation.

    Packed calls are not for it either.
    """
    B, Hq, Sq, _ = call.q.shape
    Hkv, Skv, Dv = call.v.shape[1], call.v.shape[2], call.v.shape[3]
    out = torch.zeros(B, Hq, Sq, Dv, dtype=torch.float64)
    lse = torch.full((B, Hq, Sq), -math.inf, dtype=torch.float64)
    masked_for = torch.zeros(B, Skv, dtype=torch.bool)
    if call.attn_mask is not None:
        hides = ~call.attn_mask if call.attn_mask.dtype == torch.bool else call.attn_mask.isneginf()
        masked_for = hides.expand(B, Hq, Sq, Skv).all(2).all(1)
    for b in range(B):
        valid = ~masked_for[b]
        for h in range(Hq):
            q = call.q[b, h].float()
            k, v = call.k[b, h // (Hq // Hkv)].float(), call.v[b, h // (Hq // Hkv)].float()
            k_mean = k[valid].mean(0) if recipe.smooth_k and valid.any() else torch.zeros_like(q[0])
            v_mean = v[valid].mean(0) if recipe.smooth_v and valid.any() else torch.zeros_like(v[0])
            k, v = k - k_mean, v - v_mean
            k[~valid], v[~valid] = 0, 0
            lost = (q.double() @ k_mean.double()) * call.scale * LOG2E  # [Sq]
            q_mean = torch.zeros_like(q)
            if recipe.smooth_q:
                for first in range(0, Sq, recipe.q_block):
                    rows = slice(first, first + recipe.q_block)
                    q_mean[rows] = q[rows].mean(0)
            q = q - q_mean
            q_codes, q_scale = integer_rows(q, lambda i: q_group(i, recipe), recipe.qk_max)
            k_codes, k_scale = integer_rows(k, lambda j: k_group(j, recipe), recipe.qk_max)
            v_codes, v_scale = value_channels(v, recipe)
            added = added_log2(call, b, h)
            for i in range(Sq):
                s = (k_codes @ q_codes[i]) * q_scale[i] * k_scale
                s = (s + k.double() @ q_mean[i].double()) * call.scale * LOG2E
                if call.softcap is not None or call.sinks is not None:
                    s = s + lost[i]
                if call.softcap is not None:
                    s = call.softcap * LOG2E * torch.tanh(s / (call.softcap * LOG2E))
                s = (s + added[i]).clamp(min=torch.finfo(torch.float32).min)
                s[added[i].isneginf()] = -math.inf
                m, total, acc = -math.inf, 0.0, torch.zeros(Dv, dtype=torch.float64)
                for first in range(0, Skv, recipe.k_block):
                    tile = slice(first, first + recipe.k_block)
                    peak = max(m, s[tile].max().item())
                    if peak == -math.inf:
                        continue
                    p = torch.exp2(s[tile] - peak)
                    codes = probability_codes(p, recipe)
                    decay = 2.0 ** (m - peak)
                    kept = codes / recipe.p_range if recipe.sum_quantised_p else p
                    total = total * decay + kept.sum().item()
                    acc = acc * decay + tile_times_values(codes, v_codes[tile], recipe)
                    m = peak
                sink = 0.0
                if call.sinks is not None:
                    sink_log2 = call.sinks[h].item() * LOG2E
                    top = max(m, sink_log2)
                    acc, total = acc * 2.0 ** (m - top), total * 2.0 ** (m - top)
                    sink, m = 2.0 ** (sink_log2 - top), top
                if total + sink == 0:
                    continue
                out[b, h, i] = acc / recipe.p_range * v_scale + total * v_mean
                out[b, h, i] /= total + sink
                given_back = call.softcap is not None or call.sinks is not None
                lse[b, h, i] = (m + math.log2(total + sink)) / LOG2E
                if not given_back:
                    lse[b, h, i] += lost[i] / LOG2E
    return out, lse
