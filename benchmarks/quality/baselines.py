"""Attention as one would quantise it without the papers: what the techniques are measured against.

Not for use: no catalogue lists them. A baseline is a `Variant` of its own that is put into the
layers of a patched model by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.numerics import quantize
from sagepatch.numerics.masks import merged_mask
from sagepatch.numerics.recipe import E4M3_MAX, INT8_MAX, RECIPES, Recipe
from sagepatch.spec import Call
from sagepatch.variant import Variant

# Scores that are held at once, all heads together.
MOST_SCORES = 1 << 28


def _without(name: str, label: str, **changes: bool) -> Recipe:
    return replace(RECIPES[name], name=label, **changes)


# The project's own kernels with a technique switched off.
UNSMOOTHED = (
    _without("sage1_t", "sage1_t without K smoothing", smooth_k=False),
    _without("sage1_b", "sage1_b without K smoothing", smooth_k=False),
    _without("sage1_vb", "sage1_vb without K smoothing", smooth_k=False),
    _without("sage2_8", "sage2_8 without K smoothing", smooth_k=False),
    _without("sage2_4", "sage2_4 without Q smoothing", smooth_q=False),
    _without("sage2_4", "sage2_4 without smoothing", smooth_q=False, smooth_k=False),
)
NAIVE_INT8 = "naive INT8"
FP8_PER_TENSOR = "E4M3 per tensor"
NAMES = (NAIVE_INT8, FP8_PER_TENSOR, *(recipe.name for recipe in UNSMOOTHED))


def baseline(name: str, toolchain: str) -> Variant:
    """The variant of a baseline; `toolchain` ("triton" or "emulated") runs those that differ from a
    recipe by a switch, plain torch the others.
    """
    for recipe in UNSMOOTHED:
        if recipe.name == name:
            like = BY_NAME[f"{toolchain}.{recipe.name.split(' ')[0]}"]
            return replace(like, recipe=recipe)
    function = {NAIVE_INT8: "naive_int8", FP8_PER_TENSOR: "fp8_per_tensor"}[name]
    recipe = replace(RECIPES["sage1_vb"], name=name, smooth_k=False)
    return replace(SDPA, toolchain="emulated", recipe=recipe, entry=f"{__name__}:{function}")


def naive_int8(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Q, K, V and the normalised probabilities in INT8, one scale a tensor: P has the scale 1/127,
    so that a probability under 1/254 is lost.
    """
    q, k, v = (_int8(t) for t in (call.q, call.k, call.v))
    return _plain(call, q, k, v, lambda p: torch.round(p * INT8_MAX) / INT8_MAX)


def fp8_per_tensor(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Q, K, V and P in E4M3, one scale a tensor, as FlashAttention-3's FP8 (arXiv 2407.08608)
    without its rotation; P times 256.
    """
    q, k, v = (_e4m3(t) for t in (call.q, call.k, call.v))
    return _plain(call, q, k, v, lambda p: quantize.round_to(p * 256, torch.float8_e4m3fn) / 256)


def _int8(x: Tensor) -> tuple[Tensor, float]:
    peak = float(x.abs().amax())
    return torch.round(x.float() * (INT8_MAX / peak if peak else 0.0)), peak / INT8_MAX


def _e4m3(x: Tensor) -> tuple[Tensor, float]:
    peak = float(x.abs().amax())
    scaled = x.float() * (E4M3_MAX / peak if peak else 0.0)
    return quantize.round_to(scaled, torch.float8_e4m3fn), peak / E4M3_MAX


def _plain(call: Call, q, k, v, of_p) -> tuple[Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
    """softmax(q k^T) v with every key at once, a few query rows at a time. Codes of 8 bits are
    exact in TF32, and so are their products.
    """
    (q_codes, q_scale), (k_codes, k_scale), (v_codes, v_scale) = q, k, v
    B, Hq, Sq, _ = call.q.shape
    group = Hq // call.k.shape[1]
    k_codes, v_codes = (t.repeat_interleave(group, 1) for t in (k_codes, v_codes))
    out = call.empty_out()
    rows = max(1, MOST_SCORES // (B * Hq * call.k.shape[2]))
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        for start in range(0, Sq, rows):
            stop = min(start + rows, Sq)
            scores = q_codes[:, :, start:stop] @ k_codes.mT
            scores.mul_(q_scale * k_scale * call.scale)
            mask = merged_mask(call, start, stop)
            if mask is not None and mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -math.inf)
            elif mask is not None:
                scores.add_(mask)
            p = of_p(torch.softmax(scores, 3))
            out[:, :, start:stop] = (p @ v_codes).mul_(v_scale)
    finally:
        matmul.allow_tf32 = before
    return out, None
