"""The pre-pass of the CUDA C++ kernels: codes and scales of Q, K and V in two launches, from
tensors of any strides. No attention in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Scratch rows of keys start and end at multiples of this.
PAD = 128
# Rows of Q and K are padded with zero columns to multiples of this: k of wgmma and mma for INT8.
QK_PAD = 32
# Head sizes of V are padded to multiples of this: n of wgmma.
V_PAD = 8


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads. All tensors are contiguous; take sizes and strides from them.

    Sizes: Dp is D up to a multiple of 32, D8 is Dv up to a multiple of 8. `Nkp` is the rows of keys
    of one head: Skv up to a multiple of 128. In a packed call (B = 1) member i has its keys from
    row `(cu_seqlens_kv[i] // 128 + i) * 128` on, a multiple of 128, and Nkp is
    `(Skv // 128 + members) * 128`; queries stay where they are. `groups` is B, or in a packed call
    the members.

    Scores in base 2 are (q8 @ k8^T) * q_scale_log2 * k_scale, plus `shift_log2` of the query where
    it is asked for (it changes no softmax; a log-sum-exp, a soft cap and sinks need it). Rows of
    keys that nobody sees (past the end, hidden by the key mask) hold code 0, in V too; their scale
    is that of their group, 0 where the whole group is empty: attention must mask them itself. A
    group of zeros has codes and scale 0. NaN or infinity in a group makes its scale NaN and its
    codes arbitrary.
    """

    # [B, Hq, Sq, Dp] int8, columns D..Dp zero. With a negative softmax scale the codes are negated,
    # so that scales are never negative and maxima of integer products are maxima of scores.
    q8: Tensor
    # [B, Hq, Sq] fp32, carries |softmax scale| * log2(e), at most 1e16. Per token; a recipe with
    # blocks of queries repeats the block's scale.
    q_scale_log2: Tensor
    # [B, Hkv, Nkp, Dp] int8, the mean over seen keys subtracted; columns D..Dp zero.
    k8: Tensor
    # Granularity `thread`: [B, Hkv, Nkp // 64, 4] fp32, entry t of a block of 64 keys is the scale
    # of those with (key mod 8) // 2 == t. Granularity `block`: the same array, all values of a
    # block equal. Granularity `token`: [B, Hkv, Nkp] fp32, one a key. At most 1e15.
    k_scale: Tensor
    # FP8 PV, else None: [B, Hkv, D8, Nkp] float8_e4m3fn, V transposed. Inside each 16 keys position
    # 4t + j holds key 2t + (j & 1) + 8 (j >> 1), which makes the accumulator of Q K^T the operand
    # P. Rows Dv..D8 are zero.
    vt8: Tensor | None
    # FP16 PV, else None: [B, Hkv, Nkp, D8] float16 in key order, columns Dv..D8 zero.
    v16: Tensor | None
    # [groups, Hkv, D8] fp32: multiply the output's channels by it; columns Dv..D8 zero.
    v_scale: Tensor
    # [B, Hq, Sq] fp32, softmax scale * log2(e) * q . k_mean; None unless return_lse, softcap or
    # sinks.
    shift_log2: Tensor | None
    # [groups, Hkv, Dp] fp32, what was subtracted from K, columns D..Dp zero; None for recipes that
    # do not smooth K.
    k_mean: Tensor | None
    # Calls with a key mask, else None. [B, Nkp // 32] int32: bit j of word w is 1 where key
    # 32 w + j is seen, 0 past Skv.
    key_bits: Tensor | None
    # With `key_bits`: [B] int32, 1 + the last seen key, 0 where none is: tiles behind it are dead.
    kv_len: Tensor | None
    # [4] int32, zeroed by the pre-pass: tile counters for the scheduler of a kernel behind it.
    counters: Tensor
