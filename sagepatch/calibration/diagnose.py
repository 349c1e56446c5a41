"""Why a fast recipe fails at a layer: remedies tried one by one in the order of their cost, by
emulation, on a few rows of the worst heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.choose import too_far
from sagepatch.calibration.measure import head_errors
from sagepatch.calibration.pieces import one_head, rows_of, spans, taken
from sagepatch.calibration.remedies import REMEDIES
from sagepatch.calibration.sample import HeadErrors, Remedy, Sample
from sagepatch.numerics.attention import emulate
from sagepatch.numerics.exact import members
from sagepatch.numerics.recipe import Recipe
from sagepatch.plan import DEFAULT_THRESHOLD, PlanEntry
from sagepatch.spec import Call

# Remedies are tried on RUNS stretches of ROWS query rows, of the HEADS worst heads.
RUNS = 2
ROWS = 256
HEADS = 2


def diagnosed(
    call: Call, exact: Tensor, sample: Sample, known: tuple[Remedy, ...]
) -> tuple[Remedy, ...]:
    """What was tried at a layer, after this sample: `known`, or a new search on this call.

    A search is made where the first candidate, the cheapest, fails the default threshold on this
    sample, and does so by more than on the call that `known` was tried on. `exact`
    [B, Hq, Sq, Dv] is the exact output of `call`.
    """
    names = list(sample.errors)
    if not names:
        return known
    first = BY_NAME[names[0]]
    errors = sample.errors[first.name]
    if _passes(errors) or first.tier != "fast":
        return known
    before = next((one for one in known if one.name == ""), None)
    if (
        before is not None
        and before.base == first.recipe.name
        and before.cosine <= min(errors.cosine)
    ):
        return known
    heads = sorted(range(len(errors.cosine)), key=lambda head: errors.cosine[head])[:HEADS]
    pieces = _pieces(call, exact, heads)
    found = [Remedy("", first.recipe.name, sample.place, *_worst(errors), first.name)]
    for name, (has, change) in REMEDIES.items():
        if has(first.recipe):
            continue
        tried = _tried(pieces, change(replace(first.recipe, name=f"{first.recipe.name}+")))
        if tried is None:
            continue
        kernel = _kernel(name, first.recipe, names)
        found.append(Remedy(name, first.recipe.name, sample.place, *_worst(tried), kernel))
    return tuple(found)


def explained(remedies: Sequence[Remedy], threshold: float) -> str | None:
    """A sentence: what failed at a layer, what was tried, and the first remedy that passes; None
    where nothing fails at `threshold`.
    """
    if not remedies:
        return None
    base, *tried = remedies
    failed = too_far(base.cosine, base.rel_l1, base.norm_ratio, threshold, base.place)
    if failed is None:
        return None
    shown = []
    helped = None
    for one in tried:
        off = too_far(one.cosine, one.rel_l1, one.norm_ratio, threshold, "")
        shown.append(f"{one.name} {one.cosine:.5f}")
        if off is None:
            helped = one
            break
    found = f"{base.base} fails ({failed}); tried: {', '.join(shown) or 'nothing'}"
    if helped is None:
        return f"{found}; none of them helps"
    by = f"{helped.variant} has it" if helped.variant else "no kernel has it alone"
    return f"{found}; {helped.name} helps, {by}"


def _passes(errors: HeadErrors) -> bool:
    return errors.finite and too_far(*_worst(errors), DEFAULT_THRESHOLD, "") is None


def _worst(errors: HeadErrors) -> tuple[float, float, float]:
    """Cosine, relative L1 and norm ratio, each at its worst head; finite, as JSON needs it."""
    largest = torch.finfo(torch.float32).max
    worst = errors.worst
    return worst.cosine, min(worst.rel_l1, largest), min(worst.norm_ratio, largest)


def _kernel(name: str, base: Recipe, candidates: Sequence[str]) -> str | None:
    """The first of the layer's candidates that has a remedy and is like `base` otherwise in what it
    stores P and V as.
    """
    has, change = REMEDIES[name]
    values = change(base).pv
    for candidate in candidates:
        recipe = BY_NAME[candidate].recipe
        if has(recipe) and recipe.pv == values and recipe.qk_bits == base.qk_bits:
            return candidate
    return None


def _pieces(call: Call, exact: Tensor, heads: Sequence[int]) -> list[tuple[Call, Tensor]]:
    """Calls of one head and a few query rows each over all its keys, with their exact outputs."""
    if call.packed:
        sizes = [member.q.shape[2] for member in members(call)]
        longest = sizes.index(max(sizes))
        start = sum(sizes[:longest])
        call, exact = members(call)[longest], exact[:, :, start : start + sizes[longest]]
    parts = spans(call.q.shape[2], RUNS, ROWS)
    few, wanted = rows_of(call, parts), taken(exact, parts)
    return [(one_head(few, head), wanted[:, head : head + 1]) for head in heads]


def _tried(pieces: Sequence[tuple[Call, Tensor]], recipe: Recipe) -> HeadErrors | None:
    """The worst errors of a recipe over the pieces, as those of one head each; None where it did
    not fit in memory.
    """
    try:
        parts = [head_errors(emulate(call, recipe)[0], exact) for call, exact in pieces]
    except torch.OutOfMemoryError:
        return None
    return HeadErrors(
        all(part.finite for part in parts),
        tuple(x for part in parts for x in part.cosine),
        tuple(x for part in parts for x in part.rel_l1),
        tuple(x for part in parts for x in part.rmse),
        tuple(x for part in parts for x in part.norm_ratio),
    )


def described(entry: PlanEntry) -> str | None:
    """The statistics of a layer's inputs in one line; None where nobody looked."""
    told = {
        "K mean over spread": entry.k_offset,
        "Q outliers": entry.q_outlier,
        "max |V|": entry.max_abs_v,
        "entropy of P": entry.p_entropy,
    }
    known = [f"{name} {value:.3g}" for name, value in told.items() if value is not None]
    return ", ".join(known) or None
