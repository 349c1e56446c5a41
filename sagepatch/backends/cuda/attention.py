"""Runs a call on the Hopper kernel (attention.cu): which instance, tensor maps, launch. The
pre-pass and the choice of a kernel are elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import Kernel, load, tensor_map
from sagepatch.backends.cuda.prepass import Codes, prepare
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call

# Shared memory of a block on sm_90, less a little for what the driver keeps.
MOST_SHARED_BYTES = 226 << 10
MOST_STAGES = 4
# Keys and values of heads that run together are to stay in the L2 cache (50 MB on an H100).
SECTION_BYTES = 32 << 20
# Parameters of `attention` and `key_tiles`, as launch.Layout spells them.
SIGNATURE = "TTT" + "P" * 13 + "qqq" + "i" * 17
KEY_TILES_SIGNATURE = "PPPii"
KEY_TILES_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """How one instance of the kernel works: everything but the options of a call.

    `block_n` keys a tile; `warpgroups` of 64 query rows each; `pieces` of the value columns that
    take turns in the temporary sum; `polynomial` of every 8 exponentials go to the FMA pipe;
    `pingpong`: two warpgroups take turns at the tensor cores.
    """

    block_n: int
    warpgroups: int
    flush: int
    pieces: int = 1
    ones: bool = True
    polynomial: int = 0
    pingpong: bool = False
    in_place: bool = False
    late_pack: bool = False
    pinned: bool = False

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """One warpgroup more, whose first warp copies."""
        return 128 * (self.warpgroups + 1)


def refusal(recipe: Recipe, head_dim: int, v_head_dim: int) -> str | None:
    """Why the kernel has no instance for this recipe and these head sizes; None when it has."""
    if recipe.pv not in ("e4m3", "fp16") or recipe.qk_bits != 8 or recipe.smooth_q:
        return f"recipe {recipe.name} is not one of INT8 Q and K with FP8 or FP16 P and V"
    if recipe.k_granularity not in ("thread", "block"):
        return f"K scales per {recipe.k_granularity} are not served, only thread and block"
    if recipe.smooth_v or recipe.rotate:
        return f"recipe {recipe.name} smooths V or rotates, which this kernel does not undo"
    largest = 256 if (recipe.keys_per_flush or 64) <= 64 else 128
    if max(head_dim, v_head_dim) > largest:
        return f"head sizes {head_dim} and {v_head_dim} are over {largest}, the most of this recipe"
    return None


@cache
def pick(recipe: Recipe, head_dim: int, v_head_dim: int) -> Tile:
    """The tile for a recipe and head sizes. Registers decide: 160 a thread with three consumer
    warpgroups, 240 with two. Raises `InvalidArgument` where there is none.
    """
    why = refusal(recipe, head_dim, v_head_dim)
    if why is not None:
        raise InvalidArgument(f"the CUDA kernel cannot run this call: {why}; use triton.*")
    small = max(head_dim, v_head_dim) <= 64
    flush = recipe.keys_per_flush
    three = 3 if small else 2
    if recipe.pv == "fp16":
        if flush is None:
            block_n = 128 if 64 < v_head_dim <= 128 else 64
            return Tile(block_n, three, block_n, ones=False, pingpong=not small, in_place=True)
        return Tile(64, three, flush, _pieces(v_head_dim, 4), ones=False, pingpong=not small)
    if flush is None:
        block_n = 128 if 64 < v_head_dim <= 128 else 64
        pieces = _pieces(v_head_dim, 2)
        return Tile(block_n, three, block_n, pieces, pieces == 1, 1 if small else 2, not small)
    if flush > 128:
        return Tile(192, 2, flush, polynomial=2, pingpong=True)
    if flush == 128:
        return Tile(128, three, flush, polynomial=1 if small else 2, pingpong=not small)
    if flush == 64 and 64 < v_head_dim <= 128 and head_dim <= 128:
        return Tile(128, 2, flush, polynomial=2, pingpong=True)
    pieces = _pieces(v_head_dim, 4)
    return Tile(64, three, flush, pieces, pieces == 1, 1 if small else 2, not small)


def _pieces(v_head_dim: int, columns_a_register: int) -> int:
    """Parts of the value columns whose sums fit beside an output of `v_head_dim` columns."""
    padded = -(-v_head_dim // 8) * 8
    spare = 208 - padded // 2 - 32 - 16  # scores of 64 keys and two sets of codes
    pieces = 1
    while padded // pieces // columns_a_register > spare or padded % (8 * pieces):
        pieces += 1
    return pieces


@dataclass(frozen=True, slots=True)
class Options:
    """What a call turns on."""

    causal: bool = False
    window: bool = False
    key_mask: bool = False
    packed: bool = False
    out_half: bool = False
    split: bool = False


def program(
    recipe: Recipe, head_dim: int, v_head_dim: int, options: Options, stages: int = MOST_STAGES
) -> tuple[Program, Tile, int]:
    """What is compiled for one kind of call, its tile, and its bytes of dynamic shared memory."""
    tile = pick(recipe, head_dim, v_head_dim)
    half_v = recipe.pv == "fp16"
    head = -(-head_dim // 32) * 32
    value = -(-v_head_dim // 8) * 8
    row = (32 if head <= 32 else 64 if head <= 64 else 128) * -(-head // 128)
    if half_v:
        v_bytes = tile.block_n * 128 * -(-value // 64)
    else:
        v_bytes = (value + 8 * tile.ones) * tile.block_n
    stage = tile.block_n * row + -(-v_bytes // 1024) * 1024
    fixed = tile.block_m * row + 1024
    stages = min(stages, (MOST_SHARED_BYTES - fixed) // stage)
    shared_bytes = fixed + stages * stage
    defines: dict[str, int | float | str] = {
        "HEAD": head,
        "VALUE_DIM": v_head_dim,
        "BLOCK_N": tile.block_n,
        "WARPGROUPS": tile.warpgroups,
        "STAGES": stages,
        "FLUSH": tile.flush,
        "PIECES": tile.pieces,
        "P_LOG2": f"{math.log2(recipe.p_range):.9f}f",
        "HALF_V": int(half_v),
        "HALF_T": int(recipe.accumulate == "fp16"),
        "ONES": int(tile.ones),
        "POLY": tile.polynomial,
        "PINGPONG": int(tile.pingpong),
        "IN_PLACE": int(tile.in_place),
        "LATE_PACK": int(tile.late_pack),
        "PINNED": int(tile.pinned),
        "CAUSAL": int(options.causal),
        "WINDOW": int(options.window),
        "KEY_MASK": int(options.key_mask),
        "PACKED": int(options.packed),
        "OUT_HALF": int(options.out_half),
        "SPLIT": int(options.split),
        "SHARED_BYTES": shared_bytes,
    }
    return Program("attention.cu", tuple(defines.items())), tile, shared_bytes


@cache
def _kernel(
    recipe: Recipe, head_dim: int, v_head_dim: int, options: Options
) -> tuple[Kernel, Tile, int]:
    """The loaded kernel, its tile, and the bytes of a row of Q or K in shared memory."""
    made, tile, shared_bytes = program(recipe, head_dim, v_head_dim, options)
    kernel = load(made, "attention", SIGNATURE, threads=tile.threads, shared_bytes=shared_bytes)
    head = -(-head_dim // 32) * 32
    return kernel, tile, 32 if head <= 32 else 64 if head <= 64 else 128


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits(blocks: int, tiles: int, processors: int) -> bool:
    """Whether the last blocks of queries are dealt out by tiles of keys: where whole ones would
    leave over 3 % of the GPU idle, and everybody gets enough tiles to pay for the putting together.
    """
    rounds = -(-blocks // processors)
    idle = 1 - blocks / (rounds * processors)
    return idle > 0.03 and blocks * tiles >= 8 * processors


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Attention of `call` by `recipe` on an sm_90 device and the current stream there: two launches
    of the pre-pass, one of the attention, one more for a key mask. Never waits for the device.

    Output [B, Hq, Sq, Dv] in v's dtype and the order that the call asks for, and the natural
    log-sum-exp [B, Hq, Sq] fp32 where it asks for one. A query that sees no key gives 0 and -inf.
    """
    out = call.empty_out()
    lse = call.empty_lse() if call.return_lse else None
    if out.numel() == 0:
        return out, lse
    if call.k.shape[2] == 0:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    with torch.cuda.device(call.q.device):
        attend(call, recipe, prepare(call, recipe), out, lse)
    return out, lse


def attend(call: Call, recipe: Recipe, codes: Codes, out: Tensor, lse: Tensor | None) -> None:
    """Launch the attention over what the pre-pass left, into `out` and `lse`."""
    B, Hq, Sq, D = call.q.shape
    Hkv, Skv, Dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
    device = call.q.device.index
    window = call.causal_offset is not None and call.window is not None
    members = 1 if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1
    block_m = pick(recipe, D, Dv).block_m
    m_blocks = Sq // block_m + members if call.packed else -(-Sq // block_m)
    blocks = B * Hq * m_blocks
    processors = _processors(device)
    plain = call.causal_offset is None and codes.key_bits is None and not call.packed
    split = plain and splits(blocks, -(-Skv // pick(recipe, D, Dv).block_n), processors)
    kernel, tile, swizzle = _kernel(
        recipe,
        D,
        Dv,
        Options(
            causal=call.causal_offset is not None,
            window=window,
            key_mask=codes.key_bits is not None,
            packed=call.packed,
            out_half=out.dtype == torch.float16,
            split=split,
        ),
    )
    grid = processors if split else min(blocks, processors)
    tiles = -(-Skv // tile.block_n)
    parts = ready = None
    whole, share_tiles, share_rest = blocks, 0, 0
    if split:
        whole = max(0, blocks // grid - 1) * grid
        share_tiles, share_rest = divmod((blocks - whole) * tiles, grid)
        floats = grid * (-(-Dv // 8) * 4 + 4) * 128 * tile.warpgroups
        parts = torch.empty(floats, dtype=torch.float32, device=call.q.device)
        ready = torch.zeros(grid * tile.warpgroups, dtype=torch.int32, device=call.q.device)
    q8, k8 = codes.q8, codes.k8
    padded, Dp = k8.shape[2], k8.shape[3]
    q_map = _map(q8, (1, tile.block_m, swizzle), swizzle)
    k_map = _map(k8, (1, tile.block_n, swizzle), swizzle)
    if codes.vt8 is not None:
        values = codes.vt8
        keys = 64 if tile.block_n % 128 else 128
        v_map = _map(values, (1, values.shape[2], keys), keys)
    else:
        assert codes.v16 is not None
        values = codes.v16
        v_map = _map(values, (1, tile.block_n, 64), 128)
    listed = counts = None
    words = padded // 32
    if codes.key_bits is not None and call.causal_offset is None:
        listed, counts = _key_tiles(codes.key_bits, tile.block_n, tiles, words, device)
    head_bytes = padded * (Dp + values.element_size() * (-(-Dv // 8) * 8))
    group = Hq // Hkv
    section = min(B * Hq, group * max(1, SECTION_BYTES // head_bytes))
    kernel(
        device,
        grid,
        q_map,
        k_map,
        v_map,
        codes.q_scale_log2.data_ptr(),
        codes.k_scale.data_ptr(),
        codes.v_scale.data_ptr(),
        0 if codes.shift_log2 is None else codes.shift_log2.data_ptr(),
        0 if call.cu_seqlens_q is None else call.cu_seqlens_q.data_ptr(),
        0 if call.cu_seqlens_kv is None else call.cu_seqlens_kv.data_ptr(),
        0 if listed is None else listed.data_ptr(),
        0 if counts is None else counts.data_ptr(),
        0 if codes.key_bits is None else codes.key_bits.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        0 if parts is None else parts.data_ptr(),
        0 if ready is None else ready.data_ptr(),
        *out.stride()[:3],
        B * Hq,
        Hq,
        group,
        Sq,
        Skv,
        m_blocks,
        whole,
        section,
        call.causal_offset or 0,
        call.window or 0,
        members,
        padded // 64,
        tiles,
        words,
        share_tiles,
        share_rest,
        0,
    )


def _map(t: Tensor, box: tuple[int, int, int], swizzle: int) -> bytes:
    """A tensor map of contiguous t [B, H, rows, columns] with the first two axes as one."""
    B, H, rows, columns = t.shape
    return tensor_map(
        t.data_ptr(),
        t.dtype,
        (B * H, rows, columns),
        (rows * columns, columns),
        box,
        swizzle,
        256,
    )


def _key_tiles(
    key_bits: Tensor, block_n: int, tiles: int, words: int, device: int
) -> tuple[Tensor, Tensor]:
    """Lists of whole and partial tiles [B, tiles], and how many of each [B, 2]."""
    B = key_bits.shape[0]
    made = Program("key_tiles.cu", (("BLOCK_N", block_n),))
    kernel = load(made, "key_tiles", KEY_TILES_SIGNATURE, threads=KEY_TILES_THREADS)
    listed = torch.empty((B, tiles), dtype=torch.int32, device=key_bits.device)
    counts = torch.empty((B, 2), dtype=torch.int32, device=key_bits.device)
    kernel(device, B, key_bits.data_ptr(), listed.data_ptr(), counts.data_ptr(), tiles, words)
    return listed, counts
