"""Ways to get quantised attention wrong, each as a kernel: what the failure gallery draws. None of
them is in the catalogue; a guard or a known-answer check refuses most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality.baselines import FP8_PER_TENSOR, NAIVE_INT8, baseline
from sagepatch.backends.catalogue import SDPA
from sagepatch.numerics import quantize
from sagepatch.numerics.attention import emulate, exact
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import E4M3_MAX, RECIPES, Recipe
from sagepatch.spec import Call
from sagepatch.variant import Variant

Result = tuple[Tensor, Tensor | None]
# How far the keys of an outlier layer lie from zero, in standard deviations.
OFFSET = 64.0
Q_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Mistake:
    """A column of the gallery: its heading, one sentence on what went wrong, and the kernel."""

    name: str
    story: str
    variant: Variant


def _shifted(call: Call) -> Call:
    """The same attention with keys that share an offset, as in outlier layers: softmax does not see
    it.
    """
    seed = torch.Generator().manual_seed(0)
    direction = torch.randn(call.k.shape[3], generator=seed).to(call.k)
    return replace(call, k=call.k + OFFSET * call.k.std() * direction)


def offset_unsmoothed(call: Call, recipe: Recipe) -> Result:
    return _written(call, emulate(_shifted(call), replace(RECIPES["sage1_t"], smooth_k=False))[0])


def offset_smoothed(call: Call, recipe: Recipe) -> Result:
    return _written(call, emulate(_shifted(call), RECIPES["sage1_t"])[0])


def q_mean_lost(call: Call, recipe: Recipe) -> Result:
    """Q less its mean over each block, the rest of the score never added."""
    blocks = call.q.float().split(Q_BLOCK, 2)
    q = torch.cat([block - block.mean(2, keepdim=True) for block in blocks], 2)
    return _written(call, emulate(replace(call, q=q.to(call.q.dtype)), RECIPES["sage2_8"])[0])


def base_two(call: Call, recipe: Recipe) -> Result:
    """exp2 of scores that log2(e) was not multiplied into."""
    return _written(call, exact(replace(call, scale=call.scale / LOG2E))[0])


def neighbours_scale(call: Call, recipe: Recipe) -> Result:
    """INT8 keys read with the scale of the token before."""
    k = call.k.float()
    k = k - k.mean(2, keepdim=True)
    codes, scale = quantize.to_integer(k, torch.arange(k.shape[2]), 127)
    wrong = codes * scale.roll(1, 2)
    return _written(call, exact(replace(call, k=wrong.to(call.k.dtype)))[0])


def overflow(call: Call, recipe: Recipe) -> Result:
    """P and V in E4M3 up to 448 each, summed in FP16: 448 x 448 alone is over 65504."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (call.k, call.v))
    scores = call.q.float() @ k.mT * call.scale
    p = torch.exp(scores - scores.amax(3, keepdim=True))
    peak = v.abs().amax(2, keepdim=True)
    codes = quantize.round_to(v * (E4M3_MAX / peak), torch.float8_e4m3fn)
    summed = (quantize.round_to(p * E4M3_MAX, torch.float8_e4m3fn) @ codes).half().float()
    out = summed * peak / (E4M3_MAX**2 * p.sum(3, keepdim=True))
    return _written(call, out)


def _written(call: Call, result: Tensor) -> Result:
    out = call.empty_out()
    out.copy_(result)
    return out, None


def _kernel(function: Callable[[Call, Recipe], Result]) -> Variant:
    recipe = replace(RECIPES["sage2_8"], name=function.__name__)
    return replace(
        SDPA, toolchain="emulated", recipe=recipe, entry=f"{__name__}:{function.__name__}"
    )


def mistakes() -> list[Mistake]:
    """The columns of the gallery, those that are right among them for comparison."""
    return [
        Mistake(
            "naive INT8",
            "everything in INT8, one scale a tensor: probabilities under 1/254 are gone",
            baseline(NAIVE_INT8, "emulated"),
        ),
        Mistake(
            "E4M3 per tensor",
            "everything in FP8, one scale a tensor",
            baseline(FP8_PER_TENSOR, "emulated"),
        ),
        Mistake(
            "4 bits, no smoothing",
            "sage2_4 without the smoothing of Q and K",
            baseline("sage2_4 without smoothing", "emulated"),
        ),
        Mistake(
            "offset keys, no smoothing",
            f"keys share an offset of {OFFSET:g} sigma, INT8 spends its range on it",
            _kernel(offset_unsmoothed),
        ),
        Mistake(
            "offset keys, smoothed",
            "the same keys under sage1_t: smoothing takes the offset out first (this one is right)",
            _kernel(offset_smoothed),
        ),
        Mistake(
            "mean of Q lost",
            "Q is smoothed and the part of the scores that its mean makes is never added",
            _kernel(q_mean_lost),
        ),
        Mistake(
            "no log2(e)",
            "exp2 in place of exp, the scale not adapted: softmax too flat",
            _kernel(base_two),
        ),
        Mistake(
            "a neighbour's scale",
            "each INT8 key is read with the scale of the key before it",
            _kernel(neighbours_scale),
        ),
        Mistake(
            "FP16 overflow",
            "codes of P and V up to 448 summed in FP16: Inf, and NaN downstream",
            _kernel(overflow),
        ),
    ]
