"""Compiles the Triton kernels for an architecture that is not here: sources from argument names,
no GPU, no tensors.
"""

from __future__ import annotations

import math
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sagepatch.backends.triton.exact import exact_where
from sagepatch.backends.triton.kernel import attention
from sagepatch.backends.triton.masks import _list_key_tiles, _list_tiles
from sagepatch.backends.triton.quantise import quantise as _quantise
from sagepatch.backends.triton.statistics import stats as _stats
from sagepatch.backends.triton.tiles import PAD, Tile, pieces, v_pieces
from sagepatch.numerics.recipe import Recipe

V_TYPE = {"fp16": "*fp16", "int8": "*i8", "e4m3": "*fp8e4nv"}
# Bytes of shared memory that one block may have.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def build(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], arch: int, **options: Any
) -> Any:
    """Compile `kernel`; every argument without a type here is an i32, and a None type an absent
    tensor."""
    signature, constexprs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        elif name in types and types[name] is None:
            signature[name] = "constexpr"
            constexprs[(index,)] = None
        else:
            signature[name] = types.get(name, "i32")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("skv_pad",)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def build_attention(
    arch: int,
    recipe: Recipe,
    tile: Tile,
    head_dim: int,
    *,
    causal: bool = False,
    mask: int = 0,
    packed: bool = False,
    lse: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    guard: bool = False,
) -> Any:
    d0, d1 = pieces(head_dim, 32)
    dv0, dv1 = v_pieces(head_dim, recipe)
    shifted = lse or softcap or sinks
    types = {
        "q_i8": "*i8", "q_scale_log2": "*fp32", "k_i8": "*i8", "k_scale": "*fp32",
        "v_codes": V_TYPE[recipe.pv], "v_scale": "*fp32",
        "shift_log2": "*fp32" if shifted else None,
        "q_mean_log2": "*fp32" if recipe.smooth_q else None,
        "k_mean": "*fp32" if recipe.smooth_q else None,
        "K": "*bf16" if recipe.smooth_q else None,
        "Mask": {0: None, 1: "*u8", 2: "*bf16"}[mask],
        "Tiles": "*i32" if mask else None, "Counts": "*i32" if mask else None,
        "Sinks": "*fp32" if sinks else None,
        "CuQ": "*i32" if packed else None, "CuK": "*i32" if packed else None,
        "Out": "*bf16", "Lse": "*fp32" if lse else None, "Flags": "*i32" if guard else None,
        "cap_log2": "fp32",
    }  # fmt: skip
    constants = {
        "MASK": mask, "CAUSAL": causal, "WINDOW": window, "SOFTCAP": softcap, "SINKS": sinks,
        "PACKED": packed, "LSE": lse, "GUARD": guard, "SMOOTH_Q": recipe.smooth_q,
        "Q_BLOCK": recipe.q_block, "SCALAR_K": recipe.k_granularity == "block", "PV": recipe.pv,
        "HALF": recipe.accumulate == "fp16", "P_LOG2": math.log2(recipe.p_range),
        "D": head_dim, "DV": head_dim, "D0": d0, "D1": d1, "DV0": dv0, "DV1": dv1,
        "DP2": triton.next_power_of_2(d0 + d1), "DVP2": triton.next_power_of_2(dv0 + dv1),
        "KV_PAD": PAD, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "TMA": tile.tma, "BY_HAND": False,
    }  # fmt: skip
    if constants["TMA"]:
        values = [tile.block_n, dv0] if recipe.pv == "fp16" else [dv0, tile.block_n]
        types["k_i8"] = f"tensordesc<i8[{tile.block_n}, {d0}]>"
        types["v_codes"] = f"tensordesc<{V_TYPE[recipe.pv][1:]}[{values[0]}, {values[1]}]>"
    return build(
        attention,
        types,
        constants,
        arch,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )


def build_prepass(arch: int, recipe: Recipe, head_dim: int, *, packed: bool = False) -> list[Any]:
    dp, dvp = sum(pieces(head_dim, 32)), sum(v_pieces(head_dim, recipe))
    sizes = {
        "CHUNKS": 32, "D": head_dim, "DV": head_dim, "DP2": triton.next_power_of_2(dp),
        "DVP2": triton.next_power_of_2(dvp), "PACKED": packed, "HAS_SEEN": not packed,
        "SMOOTH_K": True,
    }  # fmt: skip
    inputs = {
        "Q": "*bf16", "K": "*bf16", "V": "*bf16", "Seen": None if packed else "*u8",
        "CuQ": "*i32" if packed else None, "CuK": "*i32" if packed else None,
        "k_sum": "*fp32", "k_count": "*fp32", "v_peak": "*i32",
    }  # fmt: skip
    outputs = {
        "q_i8": "*i8", "q_scale_log2": "*fp32", "k_i8": "*i8", "k_scale": "*fp32",
        "v_codes": V_TYPE[recipe.pv], "v_scale": "*fp32", "shift_log2": "*fp32",
        "q_mean_log2": "*fp32", "k_mean": "*fp32", "factor": "fp32",
    }  # fmt: skip
    sizes_of_codes = {
        **sizes, "DP": dp, "DVP": dvp, "QK_MAX": float(recipe.qk_max),
        "Q_BLOCK": recipe.q_granularity == "block",
        "K_GROUPS": {"token": 0, "block": 1, "thread": 4}[recipe.k_granularity],
        "PV": recipe.pv, "V_RANGE": float(recipe.v_range), "Q_ROWS": 128,
        "K_ROWS": max(64, recipe.k_block), "V_ROWS": 128 if dvp > 64 else 64, "KV_PAD": PAD,
        "SMOOTH_Q": recipe.smooth_q, "SHIFT": True, "BY_HAND": False,
    }  # fmt: skip
    stats = build(_stats, inputs, {**sizes, "ROWS": 32}, arch, num_warps=4)
    codes = build(
        _quantise, {**inputs, **outputs}, sizes_of_codes, arch, num_warps=8, enable_fp_fusion=False
    )
    return [stats, codes]


def build_rest(arch: int) -> list[Any]:
    """The mask kernels and the exact fallback."""
    row = {"ADDITIVE": True, "CAUSAL": True, "WINDOW": True, "MARK": True}
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64}
    lists = {"Mask": "*bf16", "Seen": "*i32", "Tiles": "*i32", "Counts": "*i32"}
    pointers = {
        "Flags": "*i32", "Q": "*bf16", "K": "*bf16", "V": "*bf16", "Mask": "*bf16",
        "Sinks": "*fp32", "CuQ": None, "CuK": None, "Out": "*bf16", "Lse": "*fp32",
        "factor": "fp32", "cap_log2": "fp32",
    }  # fmt: skip
    options = {
        "MASK": 2, "CAUSAL": True, "WINDOW": True, "SOFTCAP": True, "SINKS": True, "PACKED": False,
        "LSE": True, "D": 128, "DV": 128, "DP2": 128, "DVP2": 128, "BLOCK_M": 64, "BLOCK_N": 32,
    }  # fmt: skip
    return [
        build(_list_tiles, lists, {**row, **blocks}, arch),
        build(_list_key_tiles, {**lists, "Mask": "*u8"}, {"BLOCK_N": 64, "GROUP": 32}, arch),
        build(exact_where, pointers, options, arch, num_warps=4, num_stages=1),
    ]
