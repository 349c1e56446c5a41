"""`emulate`: what any `Recipe` computes, in plain torch on any device, rounding where the hardware
rounds. It knows no kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagepatch.numerics import quantize
from sagepatch.numerics.exact import exact, joined, members, no_autocast
from sagepatch.numerics.masks import merged_mask, out_of_sight
from sagepatch.numerics.prepass import LOG2E, Operands, prepare
from sagepatch.numerics.recipe import CODE_DTYPE, MMA_K, Recipe
from sagepatch.spec import Call

__all__ = ["emulate", "exact"]

# Elements of one tile of scores, all heads together: small enough to stay in a core's cache, large
# enough that Python's share is small.
TILE_BUDGET = 1 << 18
LOWEST, HIGHEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


def emulate(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Compute `recipe` on `call`: output [B, Hq, Sq, Dv] fp32, natural log-sum-exp of the
    unsmoothed scores [B, Hq, Sq] fp32.

    The loop of docs/numerics.md, section 3: an online softmax over tiles of `recipe.k_block` keys.
    An FP16 accumulator is rounded after every MMA and added to FP32 every `recipe.depth` MMAs.
    Memory beyond the operands is a few tiles of `TILE_BUDGET` scores, however long the call. No
    gradient flows.

    >>> q = torch.randn(1, 2, 64, 32)
    >>> out, lse = emulate(Call(q, q, q, scale=32**-0.5), RECIPES["sage2_8"])
    """
    if recipe.exact:
        return exact(call)
    if call.packed:
        return joined([emulate(member, recipe) for member in members(call)])
    B, Hq, Sq, _ = call.q.shape
    if 0 in (B, Sq, call.k.shape[2]):
        return exact(call)
    rows = max(1, TILE_BUDGET // (B * Hq * max(recipe.k_block, call.v.shape[3])))
    with torch.no_grad(), no_autocast(call.q.device):
        operands = prepare(call, recipe)
        return joined(
            [
                _rows(call, recipe, operands, start, min(start + rows, Sq))
                for start in range(0, Sq, rows)
            ]
        )


def _rows(
    call: Call, recipe: Recipe, operands: Operands, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Query rows start to stop. The query heads of one key head are stacked: N = Hq/Hkv * rows."""
    B, Hq, _, _ = call.q.shape
    Hkv, Skv, Dv = call.v.shape[1], call.v.shape[2], call.v.shape[3]
    batch, N = B * Hkv, Hq // Hkv * (stop - start)
    stacked = _Stacked.of(operands, start, stop, (batch, N))
    m = operands.v_codes.new_full((batch, N, 1), -torch.inf)
    total = torch.zeros_like(m)
    acc = operands.v_codes.new_zeros(batch, N, Dv)
    for first in range(0, Skv, recipe.k_block):
        last = min(first + recipe.k_block, Skv)
        if out_of_sight(call, start, stop, first, last):
            continue
        s = _scores(call, operands, stacked, start, stop, first, last)  # [batch, N, keys]
        m_new = torch.maximum(m, s.amax(2, keepdim=True))
        # Where no key is seen yet the maximum is -inf, and -inf - -inf would be NaN.
        base = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p = s.sub_(base).exp2_()
        decay = torch.exp2(m - base)
        codes = _quantised_p(p, recipe)
        row_sum = codes.sum(2, True) / recipe.p_range if recipe.sum_quantised_p else p.sum(2, True)
        total = total.mul_(decay).add_(row_sum)
        values = operands.v_codes[:, :, first:last].reshape(batch, last - first, Dv)
        _accumulate(acc.mul_(decay), codes, values, recipe)
        m = m_new
    shape = (B, Hq, stop - start)
    return _finished(
        call,
        recipe,
        operands,
        acc.view(*shape, Dv),
        total.view(*shape, 1),
        m.view(*shape, 1),
        operands.shift_log2[:, :, start:stop],
    )


class _Stacked:
    """The query side of some rows, the heads that share keys stacked: [B * Hkv, N, ...]."""

    __slots__ = ("codes", "means", "scale", "shift")

    def __init__(self, codes: Tensor, scale: Tensor, shift: Tensor, means: Tensor | None) -> None:
        self.codes, self.scale, self.shift, self.means = codes, scale, shift, means

    @classmethod
    def of(cls, operands: Operands, start: int, stop: int, lead: tuple[int, int]) -> _Stacked:
        def stack(x: Tensor) -> Tensor:
            return x[:, :, start:stop].reshape(*lead, x.shape[3])

        means = operands.q_mean_log2
        return cls(
            stack(operands.q_codes),
            stack(operands.q_scale_log2),
            stack(operands.shift_log2),
            None if means is None else stack(means),
        )


def _scores(
    call: Call,
    operands: Operands,
    stacked: _Stacked,
    start: int,
    stop: int,
    first: int,
    last: int,
) -> Tensor:
    """Scores in base 2 of one tile, hidden keys at -inf; [B * Hkv, N, keys]."""
    B, Hq = call.q.shape[:2]
    k = operands.k_codes[:, :, first:last].flatten(0, 1)
    s = torch.bmm(stacked.codes, k.mT)
    s.mul_(stacked.scale).mul_(operands.k_scale[..., first:last].flatten(0, 1))
    if stacked.means is not None and operands.k_smooth is not None:
        s.baddbmm_(stacked.means, operands.k_smooth[:, :, first:last].flatten(0, 1).mT)
    if call.softcap is not None or call.sinks is not None:
        # Neither a soft cap nor a sink is shift-invariant: give back what smoothing K took.
        s.add_(stacked.shift)
    if call.softcap is not None:
        cap = call.softcap * LOG2E
        s.div_(cap).tanh_().mul_(cap)
    mask = merged_mask(call, start, stop, first, last)
    if mask is None:
        return s.clamp_(LOWEST, HIGHEST)
    by_head = s.view(B, Hq, stop - start, last - first)
    if mask.dtype == torch.bool:
        by_head.clamp_(LOWEST, HIGHEST).masked_fill_(~mask, -torch.inf)
    else:
        # finfo.min times log2(e) is -inf: back to the lowest number, since a row of finfo.min must
        # stay the mean of V. Only -inf in the mask itself hides a key, and only +inf there, or NaN,
        # spoils a row, as in SDPA.
        by_head.add_(mask.float() * LOG2E).clamp_(LOWEST, HIGHEST)
        by_head.masked_fill_(mask == -torch.inf, -torch.inf)
        by_head.masked_fill_(mask == torch.inf, torch.nan)
    return s


def _quantised_p(p: Tensor, recipe: Recipe) -> Tensor:
    """Codes of probabilities relative to the running maximum, at most P_r; scales are static."""
    if recipe.pv == "int8":
        return torch.mul(p, recipe.p_range).round_()
    return quantize.round_to(p * recipe.p_range, CODE_DTYPE[recipe.pv])


def _accumulate(acc: Tensor, codes: Tensor, values: Tensor, recipe: Recipe) -> None:
    """Add one tile of codes [batch, N, keys] times values [batch, keys, Dv] to acc, in place."""
    if recipe.keys_per_flush is None:
        acc.baddbmm_(codes, values)
        return
    step, keys = MMA_K[recipe.pv], codes.shape[2]
    for flush in range(0, keys, recipe.keys_per_flush):
        half = None
        for at in range(flush, min(flush + recipe.keys_per_flush, keys), step):
            end = min(at + step, keys)
            p, v = codes[:, :, at:end], values[:, at:end]
            # Each MMA sums its keys and the accumulator at full width and rounds once.
            whole = torch.bmm(p, v) if half is None else half.baddbmm_(p, v)
            half = quantize.round_to(whole, torch.float16)
        if half is not None:
            acc.add_(half)


def _finished(
    call: Call,
    recipe: Recipe,
    operands: Operands,
    acc: Tensor,
    total: Tensor,
    m: Tensor,
    shift_log2: Tensor,
) -> tuple[Tensor, Tensor]:
    """Normalise: acc [B, Hq, rows, Dv], total and m [B, Hq, rows, 1] after the last tile."""
    Hq = acc.shape[1]
    group = Hq // operands.v_scale.shape[1]
    denominator = total
    if call.sinks is not None:
        sink = call.sinks.float().view(1, Hq, 1, 1) * LOG2E
        top = torch.maximum(m, sink)
        base = top.masked_fill(top == -torch.inf, 0.0)
        decay = torch.exp2(m - base)
        acc, total, m = acc * decay, total * decay, top
        denominator = total + torch.exp2(sink - base)
    empty = denominator == 0
    safe = denominator.masked_fill(empty, 1.0)
    # A select, not a product: a row that sees nothing gives 0 even where V holds NaN.
    # V's scale comes last: a sum of many large values may not fit before it is an average.
    out = acc / (recipe.p_range * safe) * operands.v_scale.repeat_interleave(group, 1)
    out = out.masked_fill(empty, 0.0)
    if operands.v_mean is not None:
        weight = (total / safe).masked_fill(empty, 0.0)
        out = out + weight * operands.v_mean.repeat_interleave(group, 1)
    lse = m + torch.log2(denominator)
    if call.softcap is None and call.sinks is None:
        lse = lse + shift_log2
    return out, (lse / LOG2E).squeeze(3)
