"""The pre-pass: codes and scales of Q, K and V in two launches, statistics and quantising, from
tensors of any strides. No attention in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from sagepatch.backends.triton.launching import Recording, launch
from sagepatch.backends.triton.primitives import LOG2E
from sagepatch.backends.triton.quantise import quantise
from sagepatch.backends.triton.statistics import stats
from sagepatch.backends.triton.tiles import PAD, pieces, v_pieces
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# Interpreted kernels run on the CPU, where casts to E4M3 need help.
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Numbers of K and of V that one program of the statistics holds: on an H200 twice as many, or half,
# take up to twice the time.
STATS_TILE = 8192
# Programs that fill a large GPU; every quantising program reads the sums of all chunks of its head.
STATS_PROGRAMS = 200
MOST_CHUNKS = 32
ROWS = 64
CODE_DTYPE = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads. Padded keys hold zeros; `skv_pad` is the keys of one row of heads."""

    q_i8: Tensor  # [B, Hq, Sq, DP]
    q_scale_log2: Tensor  # [B, Hq, Sq], carries scale * log2(e)
    k_i8: Tensor  # [B, Hkv, skv_pad, DP]
    k_scale: Tensor  # [B, Hkv, skv_pad], one a key whatever the granularity
    v_codes: Tensor  # [B, Hkv, DVP, skv_pad], or [B, Hkv, skv_pad, DVP] in FP16
    v_scale: Tensor  # [groups, DVP2], a group is a batch member or packed member and a head
    shift_log2: Tensor | None  # [B, Hq, Sq], scale * log2(e) * q . k_mean
    q_mean_log2: Tensor | None  # [B, Hq, q blocks, DP2] times scale * log2(e)
    k_mean: Tensor | None  # [groups, DP2]
    skv_pad: int
    mean_blocks: int


def _chunks(groups: int, kv_len: int, rows: int) -> int:
    """Parts that the keys of one head are summed in; a pure function, so that sums repeat."""
    wanted = -(-STATS_PROGRAMS // groups)
    useful = -(-kv_len // rows)
    rounded: int = triton.next_power_of_2(max(1, min(wanted, useful)))
    return min(rounded, MOST_CHUNKS)


def prepare(
    call: Call, recipe: Recipe, seen: Tensor | None, recording: Recording | None = None
) -> Codes:
    """Quantise the tensors of `call` as `recipe` says; `seen` [B, Skv] is 0 where a key is hidden
    from everybody. Skv and Sq are at least 1.
    """
    q, k, v = call.q, call.k, call.v
    B, Hq, Sq, D = q.shape
    Hkv, Skv, Dv = k.shape[1], k.shape[2], v.shape[3]
    packed = call.packed
    members = 1 if call.cu_seqlens_kv is None else call.cu_seqlens_kv.numel() - 1
    groups = Hkv * (members if packed else B)
    skv_pad = (Skv // PAD + members) * PAD if packed else -(-Skv // PAD) * PAD
    DP, DVP = sum(pieces(D, 32)), sum(v_pieces(Dv, recipe))
    DP2, DVP2 = triton.next_power_of_2(DP), triton.next_power_of_2(DVP)
    stats_rows = max(16, STATS_TILE // max(DP2, DVP2))
    chunks = _chunks(groups, Skv, stats_rows)
    grows = recipe.q_granularity == "block" or recipe.smooth_q
    q_rows = recipe.q_block if grows else ROWS
    k_rows = max(ROWS, recipe.k_block) if recipe.k_granularity == "block" else ROWS
    v_rows = 2 * ROWS if DVP2 > 64 else ROWS
    q_blocks = Sq // q_rows + members if packed else -(-Sq // q_rows)
    k_blocks, v_blocks = skv_pad // k_rows, skv_pad // v_rows
    shift = call.return_lse or call.softcap is not None or call.sinks is not None
    f32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    k_sum = torch.empty((groups * chunks, DP2), **f32)
    k_count = torch.empty((groups * chunks,), **f32)
    v_peak = torch.empty((groups * chunks, DVP2), dtype=torch.int32, device=q.device)
    v_shape = (B, Hkv, skv_pad, DVP) if recipe.pv == "fp16" else (B, Hkv, DVP, skv_pad)
    codes = Codes(
        q_i8=torch.empty((B, Hq, Sq, DP), dtype=torch.int8, device=q.device),
        q_scale_log2=torch.empty((B, Hq, Sq), **f32),
        k_i8=torch.empty((B, Hkv, skv_pad, DP), dtype=torch.int8, device=q.device),
        k_scale=torch.empty((B, Hkv, skv_pad), **f32),
        v_codes=torch.empty(v_shape, dtype=CODE_DTYPE[recipe.pv], device=q.device),
        v_scale=torch.empty((groups, DVP2), **f32),
        shift_log2=torch.empty((B, Hq, Sq), **f32) if shift else None,
        q_mean_log2=torch.empty((B, Hq, q_blocks, DP2), **f32) if recipe.smooth_q else None,
        k_mean=torch.empty((groups, DP2), **f32) if recipe.smooth_q else None,
        skv_pad=skv_pad,
        mean_blocks=q_blocks,
    )
    seen_strides = (0, 0) if seen is None else (seen.stride(0), seen.stride(1))
    launch(
        stats,
        groups * chunks,
        (
            k,
            v,
            seen,
            call.cu_seqlens_kv,
            k_sum,
            k_count,
            v_peak,
            Hkv,
            Skv,
            *k.stride(),
            *v.stride(),
            *seen_strides,
        ),
        {
            "CHUNKS": chunks,
            "D": D,
            "DV": Dv,
            "DP2": DP2,
            "DVP2": DVP2,
            "ROWS": stats_rows,
            "PACKED": packed,
            "HAS_SEEN": seen is not None,
            "SMOOTH_K": recipe.smooth_k,
        },
        recording,
        num_warps=4,
    )
    launch(
        quantise,
        B * Hq * q_blocks + B * Hkv * (k_blocks + v_blocks),
        (
            q,
            k,
            v,
            seen,
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            k_sum,
            k_count,
            v_peak,
            codes.q_i8,
            codes.q_scale_log2,
            codes.k_i8,
            codes.k_scale,
            codes.v_codes,
            codes.v_scale,
            codes.shift_log2,
            codes.q_mean_log2,
            codes.k_mean,
            call.scale * LOG2E.value,
            B * Hkv * (k_blocks + v_blocks),
            q_blocks,
            k_blocks,
            v_blocks,
            Hq,
            Hkv,
            members,
            Sq,
            Skv,
            skv_pad,
            codes.mean_blocks,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *seen_strides,
        ),
        {
            "CHUNKS": chunks,
            "D": D,
            "DV": Dv,
            "DP": DP,
            "DVP": DVP,
            "DP2": DP2,
            "DVP2": DVP2,
            "QK_MAX": float(recipe.qk_max),
            "Q_BLOCK": recipe.q_granularity == "block",
            "K_GROUPS": {"token": 0, "block": 1, "thread": 4}[recipe.k_granularity],
            "PV": recipe.pv,
            "V_RANGE": float(recipe.v_range),
            "Q_ROWS": q_rows,
            "K_ROWS": k_rows,
            "V_ROWS": v_rows,
            "KV_PAD": PAD,
            "PACKED": packed,
            "HAS_SEEN": seen is not None,
            "SMOOTH_K": recipe.smooth_k,
            "SMOOTH_Q": recipe.smooth_q,
            "SHIFT": shift,
            "BY_HAND": INTERPRETED,
        },
        recording,
        num_warps=4 if max(DP2, DVP2) <= 128 else 8,
        enable_fp_fusion=False,
    )
    return codes
