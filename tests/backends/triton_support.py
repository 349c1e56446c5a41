"""What the Triton tests share: where kernels run, what they are compared with, and how calls are
made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from attention_calls import poison
from torch import Tensor

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.backends.triton import attention
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

ON_GPU = torch.cuda.is_available()
INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# The interpreter's bf16 arithmetic is wrong.
DTYPE = torch.bfloat16 if ON_GPU else torch.float16

needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="runs on a GPU, or through test_triton_interpreter.py"
)


def tensors(
    B: int, Hq: int, Hkv: int, Sq: int, Skv: int, D: int, Dv: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v; k has a channel offset, so that smoothing has work to do."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, Sq, D, generator=gen)
    k = torch.randn(B, Hkv, Skv, D, generator=gen) + 2 * torch.randn(1, Hkv, 1, D, generator=gen)
    v = torch.randn(B, Hkv, Skv, Dv or D, generator=gen)
    return tuple(t.to(DEVICE, DTYPE) for t in (q, k, v))  # type: ignore[return-value]


def make(shape: tuple[int, ...], seed: int = 0, **options: Any) -> Call:
    """A call of shape (B, Hq, Hkv, Sq, Skv, D[, Dv]) with the options of `Call`."""
    q, k, v = tensors(*shape, seed=seed)
    options.setdefault("scale", shape[5] ** -0.5)
    return Call(q, k, v, **options)


def twin(call: Call, recipe: Recipe) -> Recipe:
    """`recipe` with the kernel's own tile: what is summed together, where that is not the recipe's.

    Per-token and per-thread scales do not depend on the tile, so that only the order of the running
    maximum changes.
    """
    keys = attention.tile_of(call, recipe).block_n
    if keys == recipe.k_block or recipe.k_granularity == "block":
        return recipe
    if recipe.depth is None:
        return replace(recipe, k_block=max(keys, 64))
    return recipe


def deviations(
    call: Call, recipe: Recipe, *, lse: bool = True
) -> tuple[Tensor, Tensor | None, dict[str, tuple[float, float]]]:
    """Run the kernel on poisoned memory: output, log-sum-exp, and by name how far they are from the
    emulator and how far the record allows; infinite or NaN where they are not finite.
    """
    tolerance = BY_NAME[f"triton.{recipe.name}"].tolerance
    poison(call)
    out, found_lse = attention.run(replace(call, return_lse=lse), recipe)
    expected, expected_lse = emulate(call, twin(call, recipe))
    assert out.dtype == call.v.dtype
    assert tuple(out.shape) == tuple(expected.shape)
    far: dict[str, tuple[float, float]] = {}
    if out.numel():
        worst = compare(out.float(), expected.float()).worst
        far["1 - cosine"] = (1 - worst.cosine, 1 - tolerance.cosine)
        far["rel_l1"] = (worst.rel_l1, tolerance.rel_l1)
        far["norm_ratio - 1"] = (abs(worst.norm_ratio - 1), tolerance.rel_l1)
    if lse and out.numel():
        assert found_lse is not None
        assert found_lse.dtype == torch.float32
        assert found_lse.is_contiguous()
        # A code of K that rounds the other way moves a score by a step times the softmax scale.
        allowed = tolerance.lse_abs * max(1.0, abs(call.scale) * call.q.shape[3] ** 0.5)
        apart = torch.where(found_lse == expected_lse, 0.0, (found_lse - expected_lse).abs())
        far["lse"] = (apart.amax().item(), allowed)
    return out, found_lse, far


def check(call: Call, recipe: Recipe, *, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Hold the kernel to the record's tolerance from its emulator (`deviations`)."""
    out, found_lse, far = deviations(call, recipe, lse=lse)
    assert all(found <= allowed for found, allowed in far.values()), far
    return out, found_lse
