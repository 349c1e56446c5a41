"""Layers, calls and machines for tests of calibration: nothing is patched, no GPU is needed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sagepatch.backends import unusable
from sagepatch.calibration.choose import Summary
from sagepatch.calibration.sample import HeadErrors, Sample, Statistics
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.dispatch import Request
from sagepatch.env import Gpu, Machine
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.plan import PlanEntry
from sagepatch.spec import Call


def layer(name: str = "blocks.0.attn", *, emulate: bool = True, strict: bool = False):
    """A layer that was told nothing yet."""
    return PatchedLayer(name, "self", Policy(strict, "auto", emulate), Request("exact"), unusable)


def call(B=1, H=2, Sq=33, Skv=47, D=32, seed=0, **options) -> Call:
    """One call of random fp32 tensors."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, Sq, D, generator=g)
    k, v = torch.randn(2, B, H, Skv, D, generator=g).unbind(0)
    return Call(q, k, v, 1 / math.sqrt(D), **options)


def summary(variant: str, cosine: float = 0.9995, us: float | None = None, **changes) -> Summary:
    """A candidate that is fine at 0.998 unless told otherwise."""
    made = Summary(variant, True, cosine, cosine, 0.02, 0.01, 1.001, 1, 4, 3, us)
    return replace(made, **changes)


def errors(cosine: float | tuple[float, ...] = 0.9995, us: float | None = None) -> HeadErrors:
    """A candidate's errors on one call: one head's cosine, or that of each head; the other errors
    are those of noise that makes such a cosine.
    """
    heads = cosine if isinstance(cosine, tuple) else (cosine,)
    noise = tuple(math.sqrt(2 * (1 - one)) for one in heads)
    return HeadErrors(True, heads, noise, noise, (1.0,) * len(heads), us)


def sample(
    number: int,
    cosines: dict[str, float | tuple[float, ...]],
    step: tuple[int, int] | None = None,
    *,
    us: dict[str, float] | None = None,
    us_exact: float | None = None,
    run: str = "",
    v_max: float = 2.0,
) -> Sample:
    """Call `number` of a layer, in step (index, count): candidates by their cosine, and times."""
    found = {name: errors(cosine, (us or {}).get(name)) for name, cosine in cosines.items()}
    at, of = step or (None, None)
    seen = Statistics((1.0,), (4.0,), (v_max,), (0.5,))
    return Sample(number, at, of, "1x2x9x9x32 bf16", "bf16", found, seen, us_exact, run)


def calibration(*layers: LayerTable, **changes) -> Calibration:
    """A table of layers measured on one GPU."""
    return replace(Calibration("print", "Model", False, "GPU", {"torch": "2"}, layers), **changes)


def entry(site: str, variant: str, **changes) -> PlanEntry:
    """An entry measured on calls of `models.stacks` with 70 tokens."""
    made = PlanEntry(site, "self", variant, 1, "1.30x exact", 4, ("2x2x70x70x32 fp32",), "fp32")
    return replace(made, cosine=0.9995, worst_head=1, **changes)


def machine(*gpus: str) -> Machine:
    """This machine, with GPUs of these names instead of its own."""
    fake = tuple(Gpu(name, 90, 1 << 36) for name in gpus)
    return replace(Machine.here(), gpus=fake, problems=())
