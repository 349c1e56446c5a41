"""Kernels and how to reach them: the signature they share, loading on first use, and why one cannot
be used here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call
from sagepatch.variant import Variant

# What an entry point is: (call, recipe) -> (out [B, Hq, Sq, Dv] in v's dtype, lse [B, Hq, Sq] fp32
# or None).
Kernel = Callable[[Call, Recipe], tuple[Tensor, Tensor | None]]


@cache
def load(entry: str) -> Kernel:
    """Import the function that `Variant.entry` names, "module:function"."""
    module, _, function = entry.partition(":")
    kernel: Kernel = getattr(import_module(module), function)
    return kernel


@cache
def missing_package(needs: tuple[str, ...]) -> str | None:
    """A sentence naming the first of `needs` that is not installed, None when all are there."""
    for package in needs:
        if find_spec(package) is None:
            return f"package {package} is not installed (pip install {package})"
    return None


def unusable(variant: Variant) -> str | None:
    """Why `variant` cannot run on this machine at all, whatever the call; None when it can."""
    if variant.toolchain == "cuda":
        from sagepatch.backends.cuda.launch import missing

        return missing("sm_90a")
    if variant.toolchain == "cuda_mma":
        from sagepatch.backends.cuda_mma.machine import missing_here

        return missing_here()
    return missing_package(variant.needs)
