"""What the tests of the Hopper kernel share: the same loop of tiles in torch, and how far from it
the kernel may be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_calls import poison, random_call
from torch import Tensor

from sagepatch.backends.cuda import attention, attention_tiles
from sagepatch.backends.cuda.raw_operands import raw_strides
from sagepatch.numerics import quantize
from sagepatch.numerics.exact import exact, members
from sagepatch.numerics.masks import merged_mask
from sagepatch.numerics.metrics import compare
from sagepatch.numerics.prepass import prepare
from sagepatch.numerics.recipe import CODE_DTYPE, RECIPES, Recipe
from sagepatch.spec import Call

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
DEVICE = torch.device("cuda", 0)

SERVED = [RECIPES[name] for name in attention_tiles.SERVED]
every_recipe = pytest.mark.parametrize("recipe", SERVED, ids=lambda r: r.name)
dims = pytest.mark.parametrize("dim", [64, 128])
# The kernel's own faults, against the same tiles in the same order: exp2 of the hardware and the
# polynomial one move a few codes of P to their neighbours.
REL_L1 = {"e4m3": 0.012, "fp16": 0.002, "bf16": 0.004}
SHARED_REL_L1 = 0.035
LSE_ABS = 1e-2

make = partial(random_call, DEVICE)


def by_tiles(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """What the kernel computes, from the emulator's codes, in the kernel's tiles and in order of
    keys: output and log-sum-exp, fp32. `emulate` has the recipe's own tiles, and another running
    maximum rounds P elsewhere.
    """
    tile = attention_tiles.pick(recipe, call.q.shape[3], call.v.shape[3])
    operands = prepare(call, recipe)
    group = call.q.shape[1] // call.k.shape[1]
    k = operands.k_codes.repeat_interleave(group, 1).double()
    s = (operands.q_codes.double() @ k.mT).float() * operands.q_scale_log2
    s = s * operands.k_scale.repeat_interleave(group, 1)
    mask = merged_mask(call)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    v = operands.v_codes.repeat_interleave(group, 1)
    m = s.new_full((*s.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(m), s.new_zeros(*s.shape[:3], v.shape[3])
    code = CODE_DTYPE[recipe.pv]
    for first in order_of(call, tile.block_n):
        x = s[..., first : first + tile.block_n]
        m_new = torch.maximum(m, x.amax(3, keepdim=True))
        base = m_new.masked_fill(m_new == -torch.inf, 0.0)
        p, decay = torch.exp2(x - base), torch.exp2(m - base)
        codes = quantize.round_to(p * recipe.p_range, code)
        row_sum = codes.sum(3, True) / recipe.p_range if tile.ones else p.sum(3, True)
        total, acc = total * decay + row_sum, acc * decay
        for at in range(0, x.shape[3], tile.flush):
            part = codes[..., at : at + tile.flush]
            values = v[:, :, first + at : first + at + part.shape[3]]
            added = part @ values
            half = recipe.keys_per_flush is not None
            acc = acc + (quantize.round_to(added, torch.float16) if half else added)
        m = m_new
    empty = total == 0
    out = acc / (recipe.p_range * total.masked_fill(empty, 1.0))
    out = (out * operands.v_scale.repeat_interleave(group, 1)).masked_fill(empty, 0.0)
    lse = (m + torch.log2(total) + operands.shift_log2) * 0.6931471805599453
    return out, lse.squeeze(3)


def order_of(call: Call, block_n: int) -> list[int]:
    """First keys of the tiles in the order that the kernel takes: with a mask of keys and no
    positions those that are seen whole come first. One batch member then, where masks differ.
    """
    firsts = list(range(0, call.k.shape[2], block_n))
    if call.attn_mask is None or call.causal_offset is not None:
        return firsts
    seen = call.attn_mask[0, 0, 0]
    return sorted(firsts, key=lambda first: int(seen[first : first + block_n].sum()) < block_n)


def alone(call: Call) -> list[Call]:
    """The members of a packed call, or of a batch whose masks differ."""
    if call.packed:
        return members(call)
    if call.attn_mask is None or call.attn_mask.shape[0] == 1:
        return [call]
    return [
        replace(
            call,
            **{n: getattr(call, n)[i : i + 1] for n in ("q", "k", "v", "attn_mask")},
        )
        for i in range(call.q.shape[0])
    ]


def is_shared(call: Call, recipe: Recipe) -> bool:
    """Whether the last blocks of queries of this call are dealt out by tiles of keys."""
    raw_q = raw_strides(call, recipe)
    shape = attention.Shape.of(call, recipe, call.empty_out(), raw_q)
    return bool(attention.launch_of(shape).split)


def deviations(
    call: Call, recipe: Recipe, *, shared: bool = False
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Run on poisoned memory: the output, and by name how far it is from the same tiles in torch
    and how far it may be; NaN or infinite where it is not finite. Codes of P follow the maximum of
    a part where blocks are `shared`: FP8 is as far then as two roundings are from each other, and
    must be as near to exact attention as before.
    """
    poison(call)
    out, lse = attention.run(replace(call, return_lse=True), recipe)
    parts = [by_tiles(c, recipe) for c in alone(call)]
    axis = 2 if call.packed else 0
    expected = torch.cat([part[0] for part in parts], axis)
    expected_lse = torch.cat([part[1] for part in parts], axis)
    assert out.dtype == call.v.dtype
    assert out.shape == expected.shape
    assert lse is not None
    eps = torch.finfo(out.dtype).eps
    rel_l1 = compare(out.float(), expected).worst.rel_l1
    apart = torch.where(lse == expected_lse, 0.0, (lse - expected_lse).abs())
    found = {"lse": (apart.amax().item(), LSE_ABS)}
    if shared and recipe.pv == "e4m3":
        truth = exact(call)[0].float()
        before = compare(expected.to(out.dtype).float(), truth).worst.rel_l1
        found["rel_l1"] = (rel_l1, SHARED_REL_L1)
        now = compare(out.float(), truth).worst.rel_l1
        found["rel_l1 from exact attention"] = (now, 1.05 * before + 0.001)
    else:
        found["rel_l1"] = (rel_l1, REL_L1[recipe.pv] + eps)
    return out, found


def check(call: Call, recipe: Recipe, *, shared: bool = False) -> Tensor:
    """Hold the kernel to the same tiles in torch (`deviations`)."""
    out, found = deviations(call, recipe, shared=shared)
    assert all(far <= allowed for far, allowed in found.values()), found
    # Without a log-sum-exp the attention makes the codes of Q itself: the same ones.
    poison(call)
    without, _ = attention.run(replace(call, return_lse=False), recipe)
    assert torch.equal(out, without)
    return out
