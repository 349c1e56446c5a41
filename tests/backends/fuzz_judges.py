"""How far a kernel is from what it should compute on one fuzzed call, as a share of what it may be:
one judge a toolchain, each beside the reference that its own tests have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from attention_calls import poison
from torch import Tensor

from sagepatch.numerics.attention import emulate
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

Kernel = Callable[[Call, Recipe], tuple[Tensor, Tensor | None]]
Far = dict[str, tuple[float, float]]  # by name: found, allowed
# Half a step of a code of P that is 1.
P_HALF_STEP = {"e4m3": 2.0**-4, "int8": 2.0**-8, "fp16": 2.0**-11, "bf16": 2.0**-8}


def judge(toolchain: str, call: Call, recipe: Recipe) -> Far:
    """Every deviation of `<toolchain>.<recipe>` on `call`, with its bound: from the reference, of a
    run without log-sum-exp, and of a second run.
    """
    out, far, kernel = _JUDGES[toolchain](call, recipe)
    if not out.numel():
        return far
    poison(call)
    again, lse = kernel(replace(call, return_lse=True), recipe)
    poison(call)
    without, _ = kernel(replace(call, return_lse=False), recipe)
    far["second run"] = (0.0 if torch.equal(out, again) else 1.0, 0.0)
    far["run without log-sum-exp"] = (0.0 if torch.equal(out, without) else 1.0, 0.0)
    assert lse is not None
    return _widened(call, recipe, far, lse)


def share(far: Far) -> float:
    """The largest deviation as a share of its bound; infinite where a bound of 0, or finiteness, is
    missed.
    """
    worst = 0.0
    for found, allowed in far.values():
        if not found <= allowed:
            worst = max(worst, found / allowed if allowed and found < torch.inf else torch.inf)
        elif allowed:
            worst = max(worst, found / allowed)
    return worst


def _widened(call: Call, recipe: Recipe, far: Far, lse: Tensor) -> Far:
    """Bounds for few rows and few keys: one code of P, Q or K that goes to its neighbour moves them
    by its step, and only many rows and keys average that.
    """
    rows = max(1, int(lse.isfinite().sum((0, 2)).amin()))
    keys = call.k.shape[2]
    # Per channel, whatever poison lies in keys that nobody sees.
    k = call.k.float()
    high = k.nan_to_num(nan=-torch.inf, posinf=-torch.inf).amax((0, 2))
    low = k.nan_to_num(nan=torch.inf, posinf=torch.inf).amin((0, 2))
    k_step = max(0.0, float((high - low).amax())) / 2 / recipe.qk_max
    score_step = abs(call.scale) * float(call.q.float().abs().amax()) * k_step
    slack = P_HALF_STEP[recipe.pv] / rows**0.5 + score_step / 4 / min(rows, keys) ** 0.5
    wider = {"lse": score_step, "1 - cosine": slack**2}
    return {
        name: (found, allowed + wider.get(name, slack if allowed else 0.0))
        for name, (found, allowed) in far.items()
    }


def _triton(call: Call, recipe: Recipe) -> tuple[Tensor, Far, Kernel]:
    from triton_support import attention, deviations

    out, _, far = deviations(call, recipe)
    return out, far, attention.run


def _cuda(call: Call, recipe: Recipe) -> tuple[Tensor, Far, Kernel]:
    from cuda_support import attention, deviations, is_shared

    out, far = deviations(call, recipe, shared=is_shared(call, recipe))
    if recipe.pv == "e4m3":
        # Rows are summed from codes of P: where two keys weigh the same, one code that goes to its
        # neighbour, 32 of 448, moves the logarithm of the sum by as much as half of that.
        found, allowed = far["lse"]
        far["lse"] = found, allowed + P_HALF_STEP["e4m3"]
    return out, far, attention.run


def _cuda_mma(call: Call, recipe: Recipe) -> tuple[Tensor, Far, Kernel]:
    from mma_support import LSE_ABS, LSE_REL, REL_L1, run

    out, lse = run(replace(call, return_lse=True), recipe)
    expected, expected_lse = emulate(call, recipe)
    assert lse is not None
    apart = torch.where(lse == expected_lse, 0.0, (lse - expected_lse).abs())
    largest = expected_lse.abs().nan_to_num(posinf=0.0).amax()
    rel_l1 = compare(out.float(), expected.float()).worst.rel_l1
    far = {
        "rel_l1": (rel_l1, REL_L1[recipe.pv] + torch.finfo(out.dtype).eps),
        "lse": (float(apart.amax()), LSE_ABS + LSE_REL * float(largest)),
    }
    return out, far, run


_JUDGES = {"triton": _triton, "cuda": _cuda, "cuda_mma": _cuda_mma}
