"""Runs a call on the mma.sync kernel (mma_attention.cu): masks, pre-pass, instance, launch. The
choice of a kernel is elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sagepatch.backends.cuda.launch import load
from sagepatch.backends.cuda_mma.machine import target_of
from sagepatch.backends.cuda_mma.masks import KINDS, FullMask, full_mask
from sagepatch.backends.cuda_mma.prepass import Codes, prepare
from sagepatch.backends.cuda_mma.tiles import BLOCK_M, TYPES, Options, instance, pick
from sagepatch.backends.positions import positions
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call, mask_kind

# Parameters of `mma_attention`, as launch.Layout spells them.
SIGNATURE = "P" * 13 + "{Pqqqq}" + "PP" + "qqq" + "{" + "i" * 15 + "f}"
# Offset and window that hide nothing, as in mma_work.cuh.
EVERYTHING, NO_WINDOW = 1 << 29, 3 << 29
# Where the launcher cannot ask how large the L2 cache is.
PLAIN_L2_BYTES = 4 << 20


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Attention of `call` by `recipe` on the current stream of its device: two launches of the
    pre-pass, one of the attention, one more for a mask that is not one of keys only and one for
    smoothed Q. Never waits for the device.

    Output [B, Hq, Sq, Dv] in v's dtype and the order that the call asks for, and the natural
    log-sum-exp [B, Hq, Sq] fp32 where it asks for one. A query that sees no key gives 0 and -inf.
    """
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    if out.numel() == 0:
        return out, lse
    if call.k.shape[2] == 0:
        return out.zero_(), None if lse is None else _lse_of_nothing(call, lse)
    if out.device.index != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            launch(call, recipe, out, lse, target_of(call.q.device))
    else:
        launch(call, recipe, out, lse, target_of(call.q.device))
    return out, lse


def _lse_of_nothing(call: Call, lse: Tensor) -> Tensor:
    if call.sinks is None:
        return lse.fill_(-math.inf)
    return lse.copy_(call.sinks.float().view(1, -1, 1).expand_as(lse))


def launch(call: Call, recipe: Recipe, out: Tensor, lse: Tensor | None, target: str) -> None:
    """Everything that `run` launches, into `out` and `lse`, in machine code for `target`."""
    tile = pick(recipe, call.q.shape[3], call.v.shape[3], target)
    mask = full_mask(call, tile.block_n, target)
    prepared = call if mask is None else replace(call, attn_mask=mask.seen)
    attend(call, recipe, prepare(prepared, recipe, target), mask, out, lse, target)


def attend(
    call: Call,
    recipe: Recipe,
    codes: Codes,
    mask: FullMask | None,
    out: Tensor,
    lse: Tensor | None,
    target: str,
) -> None:
    """Launch the attention over codes that are there already."""
    B, Hq, Sq, D = call.q.shape
    Hkv, Skv, Dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    kind = KINDS[mask_kind(call.attn_mask)]
    made = instance(
        recipe,
        D,
        Dv,
        target,
        Options(
            mask=kind,
            mask_type=TYPES[mask.mask.dtype] if mask is not None and kind == 3 else 0,
            softcap=call.softcap is not None,
        ),
    )
    kernel = load(
        made.program,
        "mma_attention",
        SIGNATURE,
        threads=made.tile.threads,
        shared_bytes=made.shared_bytes,
    )
    members = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1
    m_blocks = Sq // BLOCK_M + members if call.packed else -(-Sq // BLOCK_M)
    kv_pad = codes.kv_pad
    head_bytes = codes.k8.stride(1) * codes.k8.element_size() + (
        codes.values.stride(1) * codes.values.element_size()
    )
    section = Hq // Hkv * max(1, l2_bytes(out.device) // 2 // head_bytes)
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    kernel(
        out.device.index,
        B * Hq * m_blocks,
        codes.q8.data_ptr(),
        codes.k8.data_ptr(),
        codes.values.data_ptr(),
        codes.q_scale_log2.data_ptr(),
        codes.k_scale.data_ptr(),
        codes.v_scale.data_ptr(),
        _address(codes.shift_log2),
        _address(codes.mean_scores_log2),
        _address(sinks),
        _address(call.cu_seqlens_q),
        _address(call.cu_seqlens_kv),
        _address(codes.key_bits),
        0 if mask is None else mask.states.data_ptr(),
        *((0, 0, 0, 0, 0) if mask is None else (mask.mask.data_ptr(), *mask.mask.stride())),
        out.data_ptr(),
        _address(lse),
        *out.stride()[:3],
        *(B * Hq, Hq, Hq // Hkv, Sq, Skv, kv_pad, m_blocks, min(B * Hq, section)),
        *_positions(call),
        members,
        *((0, 0, 0) if mask is None else mask.entry_strides),
        TYPES[out.dtype],
        0.0 if call.softcap is None else call.softcap * LOG2E,
    )


def _positions(call: Call) -> tuple[int, int]:
    """Causal offset and window as the kernel takes them."""
    if call.causal_offset is None:
        return EVERYTHING, NO_WINDOW
    tokens = call.q.shape[2] + call.k.shape[2]
    offset, window = positions(call.causal_offset, call.window, tokens)
    return offset, NO_WINDOW if call.window is None else window


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache of a CUDA device."""
    if device.type != "cuda":
        return PLAIN_L2_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
