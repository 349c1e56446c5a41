"""Runs a call on the attention kernel: masks, pre-pass, launch, and the guard behind it. Choice is
dispatch's.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import triton
from torch import Tensor
from triton.compiler import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from sagepatch.backends.chain import Chain
from sagepatch.backends.positions import plain_positions
from sagepatch.backends.prepared import VALUES, Prepared, serve
from sagepatch.backends.triton import exact as fallback
from sagepatch.backends.triton.kernel import attention, attention_of_one_key
from sagepatch.backends.triton.launching import Recording, apart, launch, links_of, tensors_of
from sagepatch.backends.triton.masks import LiveTiles, live_tiles
from sagepatch.backends.triton.prepass import INTERPRETED, Codes, prepare
from sagepatch.backends.triton.primitives import LOG2E
from sagepatch.backends.triton.tiles import PAD, Tile, one_piece, pick, pieces, v_pieces
from sagepatch.errors import InvalidArgument, KernelUnavailable
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call, arch_of, mask_kind

# The architecture that interpreted kernels take their tiles from.
INTERPRETED_ARCH = 0


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Attention of `call` by `recipe` on the device of its tensors and the current stream there.

    Launches two kernels of the pre-pass and the attention (and one or two for a mask); never waits
    for the device.
    """
    return _run(call, recipe, None)


def run_guarded(call: Call, recipe: Recipe, flags: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `run`, and where the result is not finite the exact kernel overwrites it, decided on the
    device.

    `flags` [2] int32 on the device, zeros: [0] becomes 1 when the quantised output was not finite,
    [1] when the exact one is not either, that is when the inputs are to blame. The host may read
    them whenever it likes.
    """
    return _run(call, recipe, flags)


def tile_of(call: Call, recipe: Recipe) -> Tile:
    """The tile that `run` takes for this call."""
    arch = arch_of(call.q.device)
    D, Dv = call.q.shape[3], call.v.shape[3]
    # Rows of a descriptor are counted in 32 bits.
    rows = call.k.shape[0] * call.k.shape[1] * max(call.k.shape[2] + 2 * PAD, 2 * Dv)
    return pick(
        INTERPRETED_ARCH if arch is None else arch,
        recipe,
        max(D, Dv),
        call.causal_offset is not None,
        mask_kind(call.attn_mask),
        not INTERPRETED and rows < 1 << 31 and one_piece(D, Dv, recipe),
    )


def _run(call: Call, recipe: Recipe, flags: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if 0 in call.q.shape or 0 in call.v.shape:
        out = call.empty_out().zero_()
        return out, _lse_of_nothing(call, call.empty_lse()) if call.return_lse else None
    if call.attn_mask is None and call.sinks is None and not call.packed:
        return serve("triton", _begin, call, recipe, flags)
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    _launch_there(call, recipe, out, lse, flags)
    return out, lse


def _begin(
    call: Call, recipe: Recipe, flags: Tensor | None
) -> tuple[Tensor, Tensor | None, Prepared | None]:
    """The first call of a kind: compiled where it has to be, launched by Triton and noted."""
    call = apart(call)
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    recording = Recording()
    _launch_there(call, recipe, out, lse, flags, recording)
    found = links_of(recording, tensors_of(call, out, lse, flags))
    if found is None:
        return out, lse, None
    links, scratch_bytes = found
    return out, lse, Prepared(Chain(links, VALUES), scratch_bytes, call, recipe, LOG2E.value)


def _launch_there(
    call: Call,
    recipe: Recipe,
    out: Tensor,
    lse: Tensor | None,
    flags: Tensor | None,
    recording: Recording | None = None,
) -> None:
    """`_launch` on the device of the call."""
    elsewhere = call.q.device.type == "cuda" and call.q.device.index != torch.cuda.current_device()
    try:
        with torch.cuda.device(call.q.device) if elsewhere else nullcontext():
            _launch(call, recipe, out, lse, flags, recording)
    except (CompilationError, OutOfResources, PTXASError) as error:
        raise KernelUnavailable(
            f"triton.{recipe.name} does not compile for this GPU and call "
            f"({tile_of(call, recipe)}): {error}"
        ) from error


def _lse_of_nothing(call: Call, lse: Tensor) -> Tensor:
    if call.sinks is None:
        return lse.fill_(-math.inf)
    return lse.copy_(call.sinks.float().view(1, -1, 1).expand_as(lse))


def _launch(
    call: Call,
    recipe: Recipe,
    out: Tensor,
    lse: Tensor | None,
    flags: Tensor | None,
    recording: Recording | None = None,
) -> None:
    check(recipe)
    tile = tile_of(call, recipe)
    live = live_tiles(call, tile.block_m, tile.block_n)
    codes = prepare(call, recipe, None if live is None else live.seen, recording)
    attend(call, recipe, tile, codes, live, out, lse, flags, recording)
    if flags is not None:
        fallback.run_where(flags, call, out, lse, recording)


def check(recipe: Recipe) -> None:
    """Refuse a recipe whose arithmetic this kernel does not have."""
    beyond = [
        name
        for name, found in (
            ("smooth_v", recipe.smooth_v),
            ("rotate", recipe.rotate),
            ("sum_quantised_p", recipe.sum_quantised_p),
            ("pv e5m2", recipe.pv == "e5m2"),
            ("per-thread or per-tensor Q", recipe.q_granularity in ("thread", "tensor")),
            ("per-tensor K", recipe.k_granularity == "tensor"),
        )
        if found
    ]
    if beyond:
        raise InvalidArgument(
            f"recipe {recipe.name} asks for {', '.join(beyond)}, which the Triton kernel does not "
            "have; use emulated." + recipe.name
        )


def attend(
    call: Call,
    recipe: Recipe,
    tile: Tile,
    codes: Codes,
    live: LiveTiles | None,
    out: Tensor,
    lse: Tensor | None,
    flags: Tensor | None,
    recording: Recording | None = None,
) -> None:
    """Launch the attention kernel over what the pre-pass left."""
    B, Hq, Sq, D = call.q.shape
    Hkv, Skv, Dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    members = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1
    m_blocks = Sq // tile.block_m + members if call.packed else -(-Sq // tile.block_m)
    d0, d1 = pieces(D, 32)
    dv0, dv1 = v_pieces(Dv, recipe)
    keys, values = _descriptors(codes, recipe, tile) if tile.tma else (codes.k_i8, codes.v_codes)
    k_strides = call.k.stride() if recipe.smooth_q else (0, 0, 0, 0)
    launch(
        attention if Skv > 1 else attention_of_one_key,
        B * Hq * m_blocks,
        (
            codes.q_i8,
            codes.q_scale_log2,
            keys,
            codes.k_scale,
            values,
            codes.v_scale,
            codes.shift_log2,
            codes.q_mean_log2,
            codes.k_mean,
            call.k if recipe.smooth_q else None,
            None if live is None else live.mask,
            None if live is None else live.tiles,
            None if live is None else live.counts,
            None if call.sinks is None else call.sinks.contiguous(),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            out,
            lse,
            flags,
            Hq,
            Hq // Hkv,
            members,
            Sq,
            Skv,
            codes.skv_pad,
            m_blocks,
            codes.mean_blocks,
            0 if live is None else live.tiles.shape[1],
            *out.stride()[:3],
            *k_strides,
            *((0, 0, 0, 0) if live is None else live.mask.stride()),
            *((0, 0, 0) if live is None else live.entry_strides),
            *plain_positions(call),
            0.0 if call.softcap is None else call.softcap * LOG2E.value,
        ),
        {
            "MASK": 0 if live is None else 2 if live.additive else 1,
            "CAUSAL": call.causal_offset is not None,
            "WINDOW": call.causal_offset is not None and call.window is not None,
            "SOFTCAP": call.softcap is not None,
            "SINKS": call.sinks is not None,
            "PACKED": call.packed,
            "LSE": lse is not None,
            "GUARD": flags is not None,
            "SMOOTH_Q": recipe.smooth_q,
            "Q_BLOCK": recipe.q_block,
            "SCALAR_K": recipe.k_granularity == "block",
            "PV": recipe.pv,
            "HALF": recipe.accumulate == "fp16",
            "P_LOG2": math.log2(recipe.p_range),
            "D": D,
            "DV": Dv,
            "D0": d0,
            "D1": d1,
            "DP2": triton.next_power_of_2(d0 + d1),
            "DV0": dv0,
            "DV1": dv1,
            "DVP2": triton.next_power_of_2(dv0 + dv1),
            "KV_PAD": PAD,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "TMA": tile.tma,
            "BY_HAND": INTERPRETED,
        },
        recording,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
        # The default differs between versions of Triton.
        enable_fp_fusion=True,
    )


def _descriptors(
    codes: Codes, recipe: Recipe, tile: Tile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Keys and values for the copy engine: all heads as the rows of one matrix."""
    k, v = codes.k_i8.flatten(0, 2), codes.v_codes.flatten(0, 2)
    rows = tile.block_n if recipe.pv == "fp16" else codes.v_codes.shape[2]
    columns = codes.v_codes.shape[3] if recipe.pv == "fp16" else tile.block_n
    return (
        TensorDescriptor(k, list(k.shape), list(k.stride()), [tile.block_n, k.shape[1]]),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [rows, columns]),
    )
