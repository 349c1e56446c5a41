"""What a quantised attention quantises, and how finely: the `Recipe` value and every recipe of the
project.

A recipe names no kernel and no device. `numerics.attention.emulate` computes it in plain torch;
kernels claim to. Sources: SageAttention (arXiv 2410.02367), SageAttention2 (2411.10958),
SageAttention2++ (2505.21136).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from sagepatch.errors import InvalidArgument

Tier = Literal["fast", "safe", "exact"]
Granularity = Literal["tensor", "block", "thread", "token"]
PvFormat = Literal["fp16", "bf16", "int8", "e4m3", "e5m2"]
Accumulator = Literal["fp32", "fp16", "int32"]

TIERS: tuple[Tier, ...] = ("fast", "safe", "exact")
FP16_MAX = torch.finfo(torch.float16).max
BF16_MAX = torch.finfo(torch.bfloat16).max
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_MAX = 127
INT4_MAX = 7
# Keys that one tensor-core instruction sums: k of mma.m16n8k32 (8-bit operands) and of mma.m16n8k16
# (16-bit).
MMA_K = {"e4m3": 32, "e5m2": 32, "int8": 32, "fp16": 16, "bf16": 16}
CODE_DTYPE = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
LARGEST_CODE = {
    "e4m3": E4M3_MAX,
    "e5m2": torch.finfo(torch.float8_e5m2).max,
    "int8": 127.0,
    "fp16": FP16_MAX,
    "bf16": BF16_MAX,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to quantise attention; see the table in docs/numerics.md.

    `qk_bits` is the integer width of Q and K codes. Groups: `q_block` query rows and `k_block` keys
    a block; `thread` is the grouping of an mma.m16n8k32 fragment (numerics.quantize documents it).
    `p_range` is the code of a probability of 1 and `v_range` the largest code of V; `depth` counts
    the MMAs of `MMA_K[pv]` keys that an FP16 accumulator sums before it is added to FP32 (None:
    FP32 or INT32 throughout a tile of `k_block` keys, then FP32). An FP16 accumulator that could
    overflow does not construct.
    """

    name: str
    tier: Tier
    qk_bits: Literal[8, 4, 16]
    q_granularity: Granularity
    k_granularity: Granularity
    pv: PvFormat
    accumulate: Accumulator
    p_range: float
    v_range: float
    depth: int | None = None
    q_block: int = 128
    k_block: int = 64
    smooth_k: bool = True
    smooth_q: bool = False
    smooth_v: bool = False
    rotate: bool = False
    sum_quantised_p: bool = False

    def __post_init__(self) -> None:
        if (self.accumulate == "fp16") != (self.depth is not None):
            raise InvalidArgument(
                f"recipe {self.name}: depth goes with an FP16 accumulator and only with one"
            )
        if min(self.q_block, self.k_block, 1 if self.depth is None else self.depth) < 1:
            raise InvalidArgument(
                f"recipe {self.name}: q_block {self.q_block}, k_block {self.k_block} and depth "
                f"{self.depth} must be at least 1"
            )
        most = LARGEST_CODE[self.pv]
        if max(self.p_range, self.v_range) > most:
            raise InvalidArgument(
                f"recipe {self.name}: P_r {self.p_range:g} and V_r {self.v_range:g} are limited to "
                f"{most:g}, the largest code of {self.pv}; lower them"
            )
        if (self.accumulate == "int32") != (self.pv == "int8"):
            raise InvalidArgument(
                f"recipe {self.name}: INT8 values go with an INT32 accumulator and only with one"
            )
        if self.keys_per_flush is not None:
            if self.k_block % self.keys_per_flush:
                raise InvalidArgument(
                    f"recipe {self.name}: a tile of {self.k_block} keys is no multiple of the "
                    f"{self.keys_per_flush} keys between two flushes; change k_block or depth"
                )
            largest_p, largest_v = (_largest_code(r, self.pv) for r in (self.p_range, self.v_range))
            bound = self.keys_per_flush * largest_p * largest_v
            if bound > FP16_MAX:
                raise InvalidArgument(
                    f"recipe {self.name}: {self.keys_per_flush} keys x P_r {largest_p:g} "
                    f"x V_r {largest_v:g} = {bound:g} can overflow an FP16 accumulator "
                    f"(at most {FP16_MAX:g}); lower one of them or the depth"
                )

    @property
    def exact(self) -> bool:
        return self.tier == "exact"

    @property
    def keys_per_flush(self) -> int | None:
        """Keys summed in FP16 before a flush to FP32, or None where nothing is summed in FP16."""
        return None if self.depth is None else self.depth * MMA_K[self.pv]

    @property
    def qk_max(self) -> int:
        """Largest code of Q and K: 127 or 7, symmetric, never -128."""
        return INT4_MAX if self.qk_bits == 4 else INT8_MAX


def _largest_code(limit: float, pv: PvFormat) -> float:
    """What a value scaled to `limit` can become: rounding to the format may go up."""
    rounded = torch.tensor(limit, device="cpu").to(CODE_DTYPE[pv]).item()
    return max(limit, float(rounded))


def largest_fp16_v_range(depth: int, p_range: float, keys_per_mma: int) -> float:
    """The largest V_r that keeps `depth` MMAs of P_r * V_r inside an FP16 accumulator."""
    return FP16_MAX / (depth * keys_per_mma * p_range)


EXACT = Recipe("exact", "exact", 16, "tensor", "tensor", "fp16", "fp32", 1.0, 1.0, smooth_k=False)

# FP16 P and V: a V channel whose largest magnitude exceeds `v_range` is scaled down by a power of
# two.
_SAGE1_F16_RANGE = largest_fp16_v_range(4, 1.0, MMA_K["fp16"])
_SAGE1_F32_RANGE = 2.0**15

SAGE1_T = Recipe(
    "sage1_t", "safe", 8, "token", "token", "fp16", "fp16", 1.0, _SAGE1_F16_RANGE, depth=4
)
SAGE1_B = Recipe(
    "sage1_b", "safe", 8, "block", "block", "fp16", "fp16", 1.0, _SAGE1_F16_RANGE, depth=4
)
SAGE1_T_F32 = Recipe(
    "sage1_t_f32", "safe", 8, "token", "token", "fp16", "fp32", 1.0, _SAGE1_F32_RANGE
)
SAGE1_B_F32 = Recipe(
    "sage1_b_f32", "safe", 8, "block", "block", "fp16", "fp32", 1.0, _SAGE1_F32_RANGE
)
SAGE1_VT = Recipe("sage1_vt", "fast", 8, "token", "token", "int8", "int32", 127.0, 127.0)
SAGE1_VB = Recipe("sage1_vb", "fast", 8, "block", "block", "int8", "int32", 127.0, 127.0)
SAGE2_8 = Recipe("sage2_8", "fast", 8, "token", "thread", "e4m3", "fp32", E4M3_MAX, E4M3_MAX)
# P and V in BF16: V is what the caller gave, P is rounded as exact BF16 attention rounds it. BF16
# has the exponents of FP32: the code of 1 is small so that sums of 16 million of the largest V stay
# finite until they are averages.
SAGE2_8_BF16 = replace(
    SAGE2_8, name="sage2_8_bf16", tier="safe", pv="bf16", p_range=2.0**-24, v_range=BF16_MAX
)
SAGE2_8B = replace(SAGE2_8, name="sage2_8b", k_granularity="block")
SAGE2_8B_K128 = replace(SAGE2_8B, name="sage2_8b_k128", k_block=128)
SAGE2_4 = replace(SAGE2_8, name="sage2_4", qk_bits=4, smooth_q=True)
SAGE2_4_F16 = replace(
    SAGE2_4,
    name="sage2_4_f16",
    tier="safe",
    pv="fp16",
    accumulate="fp16",
    p_range=1.0,
    v_range=_SAGE1_F16_RANGE,
    depth=4,
)
SAGE2PP_8 = replace(
    SAGE2_8, name="sage2pp_8", accumulate="fp16", p_range=224.0, v_range=4.5, depth=2
)
SAGE2PP_8_D1 = replace(SAGE2PP_8, name="sage2pp_8_d1", p_range=448.0, v_range=4.5, depth=1)
SAGE2PP_8_D4 = replace(
    SAGE2PP_8, name="sage2pp_8_d4", p_range=224.0, v_range=2.25, depth=4, k_block=128
)
SAGE2PP_8_D6 = replace(
    SAGE2PP_8, name="sage2pp_8_d6", p_range=224.0, v_range=1.5, depth=6, k_block=192
)
SAGE2PP_4 = replace(SAGE2PP_8, name="sage2pp_4", qk_bits=4, smooth_q=True)
SAGE2PP_4_D1 = replace(SAGE2PP_8_D1, name="sage2pp_4_d1", qk_bits=4, smooth_q=True)
SAGE2PP_4_D4 = replace(SAGE2PP_8_D4, name="sage2pp_4_d4", qk_bits=4, smooth_q=True)
SAGE2PP_4_D6 = replace(SAGE2PP_8_D6, name="sage2pp_4_d6", qk_bits=4, smooth_q=True)

# Within a tier, the order in which candidates are ranked where nothing can be timed.
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        SAGE2PP_8,
        SAGE2_8,
        SAGE2_8B,
        SAGE2_8B_K128,
        SAGE2PP_8_D1,
        SAGE2PP_8_D4,
        SAGE2PP_8_D6,
        SAGE2PP_4,
        SAGE2_4,
        SAGE2PP_4_D1,
        SAGE2PP_4_D4,
        SAGE2PP_4_D6,
        SAGE1_VT,
        SAGE1_VB,
        SAGE1_B,
        SAGE1_T,
        SAGE1_B_F32,
        SAGE1_T_F32,
        SAGE2_8_BF16,
        SAGE2_4_F16,
        EXACT,
    )
}
