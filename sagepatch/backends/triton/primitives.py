"""Small jit pieces that the kernels share: magnitudes that keep NaN, integer and E4M3 codes, the
member of a packed call that a block belongs to, and what a mask does to a tile of scores.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 1.5 * 2^23: adding it to |x| < 2^22 leaves rint(x), half to even, in the low bits.
RINT = tl.constexpr(12582912.0)
# Below this the reciprocal 127/amax overflows: such a group is zeros.
TINY = tl.constexpr(1e-35)
LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)
# What the kernels' MASK says; 0 is no mask.
BOOL_MASK = tl.constexpr(1)
ADDITIVE_MASK = tl.constexpr(2)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, fp32 as int32: they order as |x| does, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def inverse_and_scale(bits, LARGEST: tl.constexpr):
    """From a group's largest `magnitude_bits`: LARGEST/amax (0 for a group of zeros) and
    amax/LARGEST (NaN where the group holds NaN or infinity, so that it reaches the output).
    """
    amax = bits.to(tl.float32, bitcast=True)
    zero = amax < TINY
    inverse = tl.where(zero, 0.0, tl.div_rn(LARGEST, tl.where(zero, 1.0, amax)))
    scale = tl.where(zero, 0.0, tl.div_rn(amax, LARGEST))
    return inverse, scale + amax * 0.0


@triton.jit
def to_int8(x):
    """rint(x) as int8, for |x| up to 127."""
    return (x + RINT).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def to_e4m3(x, BY_HAND: tl.constexpr):
    """Round fp32 to E4M3, half to even. `BY_HAND` rounds before the cast: the interpreter's cast
    does not.
    """
    if BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        subnormal = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def key_at(position):
    """The key that an 8-bit V holds at `position`; within each 16, position 4t + 2a + j holds key
    8a + 2t + j.

    In this order the columns of P that a thread has from the product of Q and K are those it needs
    for the product with V (kernels of the same order: SageAttention2, section 3.3): no shuffles.
    """
    within = position & 15
    key = ((within >> 1) & 1) * 8 + (within >> 2) * 2 + (within & 1)
    return position - within + key


@triton.jit
def in_key_order(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns of `p` [BLOCK_M, BLOCK_N] moved to where `key_at` puts their keys."""
    parts = tl.reshape(p, [BLOCK_M, BLOCK_N // 16, 2, 4, 2])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [BLOCK_M, BLOCK_N])


@triton.jit
def member_of(Cu, members, block, UNIT: tl.constexpr):
    """The member of a packed call that owns block number `block` of UNIT tokens.

    Member i owns the blocks from Cu[i] // UNIT + i on: enough for its tokens, whatever its length,
    and known without a sum over the members before it.
    """
    low = block * 0
    high = block * 0 + members - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts = tl.load(Cu + middle).to(tl.int32) // UNIT + middle
        high = tl.where(starts <= block, high, middle - 1)
        low = tl.where(starts <= block, middle, low)
    return low


@triton.jit
def span_of(Cu, member, total):
    """First token and length of a member; offsets out of range are cut to the tensor."""
    start = tl.minimum(tl.maximum(tl.load(Cu + member).to(tl.int32), 0), total)
    stop = tl.minimum(tl.maximum(tl.load(Cu + member + 1).to(tl.int32), start), total)
    return start, stop - start


@triton.jit
def seen_by_position(rows, keys, kv_len, causal_offset, window, CAUSAL, WINDOW):
    """Which keys each row sees by position alone, [rows, keys]."""
    seen = (rows[:, None] >= 0) & (keys < kv_len)[None, :]
    if CAUSAL:
        last = rows[:, None] + causal_offset
        seen &= keys[None, :] <= last
        if WINDOW:
            seen &= keys[None, :] > last - window
    return seen


@triton.jit
def mask_of(mask_at, stride_q, stride_k, rows, keys, q_len, kv_len):
    """One tile of the mask; `mask_at` points at the mask of this batch and head.

    Load it before the product of Q and K: the compiler lays the softmax out as the last of the two
    is, and everything after it would spill in the layout of a load.
    """
    where = mask_at + rows.to(tl.int64)[:, None] * stride_q + keys.to(tl.int64)[None, :] * stride_k
    return tl.load(where, mask=(rows < q_len)[:, None] & (keys < kv_len)[None, :], other=0)


@triton.jit
def masked(scores, seen, value, MASK):
    """`scores` in base 2 with the tile `value` of the mask applied and everything not `seen` at
    -inf.

    A bias is clamped to fp32's range after the change to base 2, so that a row of finfo.min stays
    the mean of V; +inf and NaN spoil their row, as in SDPA.
    """
    if MASK == BOOL_MASK:
        seen &= value != 0
    elif MASK == ADDITIVE_MASK:
        seen &= value != float("-inf")
        bias = tl.minimum(tl.maximum(value.to(tl.float32) * LOG2E, LOWEST), HIGHEST)
        # A maximum drops NaN; one in the mask must reach the output.
        bias = tl.where(value < float("inf"), bias, float("nan"))
        total = scores + bias
        scores = tl.where(total < LOWEST, LOWEST, total)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy: by the exponential, and by its series where that would cancel, as a
    large soft cap multiplies what is left.
    """
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(square < 0.0025, series, 1.0 - 2.0 / (1.0 + tl.math.exp2(x * (2.0 * LOG2E))))
