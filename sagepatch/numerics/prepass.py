"""The pre-pass of a quantised attention: smoothed, rotated and quantised Q, K and V of one call.
Softmax is not in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sagepatch.numerics import quantize, smooth
from sagepatch.numerics.masks import seen_keys
from sagepatch.numerics.recipe import CODE_DTYPE, Recipe
from sagepatch.spec import Call

LOG2E = math.log2(math.e)
# Beyond these scales a product of scores leaves fp32; a softmax is one-hot there anyway.
MOST_Q_SCALE, MOST_K_SCALE = 1e16, 1e15


@dataclass(frozen=True, slots=True)
class Operands:
    """What attention multiplies. Keys that a mask hides from everybody have codes of zero.

    Scores in base 2 are q_codes @ k_codes^T * q_scale_log2 * k_scale + q_mean_log2 @ k_smooth^T;
    smoothing K took `shift_log2` from each row of them.
    """

    q_codes: Tensor  # [B, Hq, Sq, P], P the head size, or the power of two above it if rotated
    q_scale_log2: Tensor  # [B, Hq, Sq, 1], carries scale * log2(e)
    k_codes: Tensor  # [B, Hkv, Skv, P]
    k_scale: Tensor  # [B, Hkv, 1, Skv]
    v_codes: Tensor  # [B, Hkv, Skv, Dv]
    v_scale: Tensor  # [B, Hkv, 1, Dv]
    v_mean: Tensor | None  # [B, Hkv, 1, Dv]
    q_mean_log2: Tensor | None  # [B, Hq, Sq, P], mean of the query block times scale * log2(e)
    k_smooth: Tensor | None  # [B, Hkv, Skv, P], what q_mean_log2 multiplies
    shift_log2: Tensor  # [B, Hq, Sq, 1], scale * log2(e) * q . k_mean


def prepare(call: Call, recipe: Recipe) -> Operands:
    """Quantise the tensors of a call that is not packed; all arithmetic in fp32."""
    # Contiguous, as torch sums in the order of memory: the last bits must not depend on strides.
    q, k, v = (t.float().contiguous() for t in (call.q, call.k, call.v))
    factor = call.scale * LOG2E
    seen = seen_keys(call)
    keep = None if seen is None else seen[:, None, :, None]
    k_mean = smooth.masked_mean(k, seen) if recipe.smooth_k else None
    v_mean = smooth.masked_mean(v, seen) if recipe.smooth_v else None
    k, v = _centred(k, k_mean, keep), _centred(v, v_mean, keep)
    shift = torch.zeros_like(q[..., :1])
    if k_mean is not None:
        group = q.shape[1] // k.shape[1]
        shift = (q * k_mean.repeat_interleave(group, 1)).sum(3, keepdim=True) * factor
    if recipe.rotate:
        q, k = smooth.rotate(q), smooth.rotate(k)
    q_mean = smooth.block_mean(q, recipe.q_block) if recipe.smooth_q else None
    q = q if q_mean is None else q - q_mean
    q_groups = quantize.query_groups(
        q.shape[2], recipe.q_granularity, recipe.q_block, device=q.device
    )
    k_groups = quantize.key_groups(
        k.shape[2], recipe.k_granularity, recipe.k_block, device=k.device
    )
    q8 = quantize.to_integer(q, q_groups, recipe.qk_max)
    k8 = quantize.to_integer(k, k_groups, recipe.qk_max)
    v8 = _quantised_v(v, recipe)
    return Operands(
        q_codes=q8.codes,
        q_scale_log2=(q8.scale * factor).clamp(-MOST_Q_SCALE, MOST_Q_SCALE),
        k_codes=k8.codes,
        k_scale=k8.scale.clamp(max=MOST_K_SCALE).mT,
        v_codes=v8.codes,
        v_scale=v8.scale,
        v_mean=v_mean,
        q_mean_log2=None if q_mean is None else q_mean * factor,
        k_smooth=None if q_mean is None else k,
        shift_log2=shift,
    )


def _centred(x: Tensor, mean: Tensor | None, keep: Tensor | None) -> Tensor:
    """x without its mean, zero where it is not to be kept, whatever bytes lie there."""
    x = x if mean is None else x - mean
    return x if keep is None else torch.where(keep, x, 0.0)


def _quantised_v(v: Tensor, recipe: Recipe) -> quantize.Quantised:
    if recipe.pv == "int8":
        return quantize.to_integer_per_channel(v, int(recipe.v_range))
    if recipe.pv == "fp16":
        return quantize.to_float16_per_channel(v, recipe.v_range)
    if recipe.pv == "bf16":
        return quantize.to_bfloat16(v)
    return quantize.to_float8_per_channel(v, recipe.v_range, CODE_DTYPE[recipe.pv])
