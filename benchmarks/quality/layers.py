"""Errors of attention layer by layer, on the calls of a real run: the price of a condition where it
is paid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import sagepatch
from benchmarks.quality.conditions import Condition, variant_of
from sagepatch.backends import load
from sagepatch.backends.catalogue import SDPA
from sagepatch.layer import PatchedLayer
from sagepatch.numerics.attention import exact
from sagepatch.numerics.metrics import compare
from sagepatch.spec import Call


def captured(
    model: Any, run: Callable[[], object], wanted: Sequence[int]
) -> list[tuple[str, int, Call]]:
    """The calls of every layer while `run` runs, those numbered in `wanted` (from 1), as
    (layer, number, call) with tensors of their own.
    """
    found: list[tuple[str, int, Call]] = []
    counts: dict[str, int] = {}

    def look(layer: PatchedLayer, call: Call) -> None:
        counts[layer.name] = counts.get(layer.name, 0) + 1
        if counts[layer.name] in wanted:
            kept = Call(
                call.q.clone(),
                call.k.clone(),
                call.v.clone(),
                call.scale,
                None if call.attn_mask is None else call.attn_mask.clone(),
                call.causal_offset,
            )
            found.append((layer.name, counts[layer.name], kept))

    with sagepatch.apply(model, variant="exact") as patch:
        for layer in patch.layers:
            layer.observer = look
        run()
    return found


def rows(
    calls: Sequence[tuple[str, int, Call]], conditions: Sequence[Condition]
) -> list[dict[str, object]]:
    """Every condition on every call, against exact attention in FP64: one row each. What K's mean
    is over its spread says how much K smoothing has to do.
    """
    found: list[dict[str, object]] = []
    for name, number, call in calls:
        reference = exact(call, torch.float64)[0]
        for condition in conditions:
            variant = SDPA if condition.group == "exact" else variant_of(condition, call.q.device)
            out, _ = load(variant.entry)(call, variant.recipe)
            result = compare(out.double(), reference)
            found.append(
                {
                    "layer": name,
                    "call": number,
                    "condition": condition.name,
                    "group": condition.group,
                    "cosine": f"{result.whole.cosine:.6f}",
                    "cosine_worst_head": f"{result.worst.cosine:.6f}",
                    "rel_l1": f"{result.whole.rel_l1:.5f}",
                    "rel_l1_worst_head": f"{result.worst.rel_l1:.5f}",
                    "sqnr_db": f"{result.whole.sqnr_db:.1f}",
                    "k_mean_over_spread": f"{mean_over_spread(call.k):.2f}",
                    "k_peak_over_spread": f"{peak_over_spread(call.k):.1f}",
                    "v_peak": f"{float(call.v.abs().amax()):.2f}",
                }
            )
    return found


def mean_over_spread(k: Tensor) -> float:
    """The largest |mean over tokens| of a channel over the RMS of what varies, worst head; k
    [B, H, S, D].
    """
    k = k.double()
    mean = k.mean(2)
    spread = (k - mean.unsqueeze(2)).square().mean((2, 3)).sqrt()
    return float((mean.abs().amax(2) / spread.clamp_min(1e-30)).amax())


def peak_over_spread(k: Tensor) -> float:
    """The largest |k - mean| over the RMS of it, worst head: outliers that smoothing leaves."""
    k = k.double()
    rest = k - k.mean(2, keepdim=True)
    return float(
        (rest.abs().amax((2, 3)) / rest.square().mean((2, 3)).sqrt().clamp_min(1e-30)).amax()
    )
