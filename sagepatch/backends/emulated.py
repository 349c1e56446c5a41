"""The kernel that is no kernel: every recipe in plain torch, slow, right by definition, on any
device.
"""

from __future__ import annotations

from torch import Tensor

from sagepatch.numerics.attention import emulate
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Emulate `recipe` on `call`; see `numerics.attention.emulate`."""
    out = call.empty_out()
    result, lse = emulate(call, recipe)
    out.copy_(result)
    return out, lse if call.return_lse else None
