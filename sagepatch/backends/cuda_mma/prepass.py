"""Codes and scales of Q, K and V for the mma.sync kernel: the pre-pass of the CUDA kernels, and
with smoothed Q the scores of the means. No attention in here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import load
from sagepatch.backends.cuda.prepass import plan_of
from sagepatch.backends.cuda.prepass_form import form_of, own_strides, qk_columns
from sagepatch.backends.cuda_mma.tiles import TYPES
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# Parameters of `mean_scores`, and its tiles.
MEANS_SIGNATURE = "PP{qqqq}PPP" + "i" * 7
MEANS_THREADS, MEANS_TILE = 256, 64


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads; backends.cuda.prepass.Codes says what is in them. `kv_pad` is the rows
    of keys of one head.
    """

    q8: Tensor  # [B, Hq, Sq, Dp] int8; [B, Hq, Sq, Dp // 2] in INT4
    q_scale_log2: Tensor  # [B, Hq, Sq] fp32
    k8: Tensor  # [B, Hkv, kv_pad, Dp] int8; [B, Hkv, kv_pad, Dp // 2] in INT4
    k_scale: Tensor  # [B, Hkv, kv_pad] fp32 (per token) or [B, Hkv, kv_pad // 64, 4]
    values: Tensor  # [B, Hkv, D8, kv_pad] e4m3 or int8, or [B, Hkv, kv_pad, D8] float16
    v_scale: Tensor  # [groups, Hkv, D8] fp32
    shift_log2: Tensor | None  # [B, Hq, Sq] fp32
    mean_scores_log2: Tensor | None  # [B, Hq, q blocks, kv_pad] fp32, with smoothed Q
    key_bits: Tensor | None  # [B, kv_pad // 32] int32
    kv_pad: int


def prepare(call: Call, recipe: Recipe, target: str) -> Codes:
    """Quantise the tensors of `call` as `recipe` says, on the current stream of their device: two
    launches, three with smoothed Q. The only mask is one of keys.
    """
    plan = plan_of(replace(form_of(call, recipe), target=target))
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=call.q.device)
    plan.launch(call, scratch.data_ptr())
    codes = plan.codes(scratch)
    values = codes.vt8 if codes.vt8 is not None else codes.v16
    assert values is not None
    assert codes.v_scale is not None
    scores = None
    if codes.q_mean_log2 is not None:
        scores = mean_scores(call, codes.q_mean_log2, codes.k_mean, plan.kv_pad, target)
    return Codes(
        codes.q8,
        codes.q_scale_log2,
        codes.k8,
        codes.k_scale,
        values,
        codes.v_scale,
        codes.shift_log2,
        scores,
        codes.key_bits,
        plan.kv_pad,
    )


def mean_scores(call: Call, means: Tensor, k_mean: Tensor, kv_pad: int, target: str) -> Tensor:
    """Scores of the means of query blocks, means [B, Hq, q blocks, Dp] times K less k_mean [groups,
    Hkv, Dp]: [B, Hq, q blocks, kv_pad] fp32. Of keys past the end they are 0; packed, only those
    of a member's own keys mean anything.
    """
    B, Hq, q_blocks, dp = means.shape
    Hkv, Skv, D = call.k.shape[1:]
    scores = torch.empty((B, Hq, q_blocks, kv_pad), dtype=torch.float32, device=means.device)
    rows = Hq // Hkv * q_blocks
    row_tiles, key_tiles = -(-rows // MEANS_TILE), kv_pad // MEANS_TILE
    offsets = call.cu_seqlens_kv
    kernel = load(
        means_program(call.k.dtype, D, dp, offsets is not None, target),
        "mean_scores",
        MEANS_SIGNATURE,
        threads=MEANS_THREADS,
    )
    kernel(
        means.device.index,
        B * Hkv * row_tiles * key_tiles,
        means.data_ptr(),
        call.k.data_ptr(),
        *own_strides(call.k.stride(), tuple(call.k.shape)),
        k_mean.data_ptr(),
        0 if offsets is None else offsets.data_ptr(),
        scores.data_ptr(),
        *(rows, row_tiles, key_tiles, Hkv, k_mean.shape[0], Skv, kv_pad),
    )
    return scores


def means_program(
    dtype: torch.dtype, head_dim: int, columns: int, packed: bool, target: str
) -> Program:
    """The program of `mean_scores`."""
    defines = (
        ("K_TYPE", TYPES[dtype]),
        ("HEAD", head_dim),
        ("DP", columns),
        ("PACKED", int(packed)),
        ("VECTORS", 0),
    )
    return Program("mma_means.cu", defines, target)


def means_instances(recipe: Recipe, head_dim: int, target: str) -> tuple[Program, ...]:
    """What `sagepatch build` compiles ahead beside the pre-pass."""
    if not recipe.smooth_q:
        return ()
    columns = qk_columns(recipe, head_dim)
    return (means_program(torch.bfloat16, head_dim, columns, False, target),)
