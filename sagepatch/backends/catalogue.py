"""The table of every kernel that sagepatch has, in the order of preference within a tier. Adding
one is a row here.
"""

from __future__ import annotations

from sagepatch.numerics.recipe import EXACT, RECIPES
from sagepatch.variant import Tolerance, Variant

_ANY_DEVICE = frozenset({"cpu", "cuda", "mps", "xpu"})
_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})

SDPA = Variant(
    toolchain="sdpa",
    recipe=EXACT,
    entry="sagepatch.backends.sdpa:run",
    devices=_ANY_DEVICE,
    archs=None,
    head_dims=(1, 65536),
    dtypes=_FLOATS,
    tolerance=Tolerance(cosine=1.0, rel_l1=0.0),
)

EMULATED = tuple(
    Variant(
        toolchain="emulated",
        recipe=recipe,
        entry="sagepatch.backends.emulated:run",
        devices=_ANY_DEVICE,
        archs=None,
        head_dims=(1, 512),
        dtypes=_FLOATS,
        tolerance=Tolerance(cosine=1.0, rel_l1=0.0),
    )
    for recipe in RECIPES.values()
    if not recipe.exact
)

CATALOGUE: tuple[Variant, ...] = (*EMULATED, SDPA)
BY_NAME: dict[str, Variant] = {variant.name: variant for variant in CATALOGUE}
