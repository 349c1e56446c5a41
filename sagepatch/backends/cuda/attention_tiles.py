"""Which instance of the Hopper kernel (attention.cu) serves a recipe and head sizes: tiles, shared
memory, macros. Pure; compiles and launches nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.prepass_form import HALVES, QK_PAD, V_PAD
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import Recipe

# Shared memory of a block on sm_90, less a little for what the driver keeps; tiles in flight.
MOST_SHARED_BYTES = 226 << 10
MOST_STAGES = 4
# Registers of a thread for output, sums, scores and codes when two warpgroups share the file, and
# columns that a tensor map can load at once.
MOST_REGISTERS = 208
MOST_COLUMNS = 256
# Part of the GPU that may idle in the last round before the last blocks of queries are shared.
IDLE, FEW_IDLE = 0.08, 0.02
# How far P may outgrow the running maximum, as a power of two, before all is scaled by it: FP16 has
# room for 2^16 over 1. Under a cap on the scores BF16 takes any of them.
LAG, CAP = 8, 40
# Columns of V that lie side by side in shared memory in FP16.
HALF_PANEL = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """How one instance of the kernel works: everything but the options of a call.

    `block_n` keys a tile; `warpgroups` of 64 query rows each; `flush` keys that the temporary sum
    takes; `pieces` of the value columns that take turns in it; `ones`: row sums by the tensor core;
    `polynomial` of every 8 exponentials go to the FMA pipe; `pingpong`: two warpgroups take turns
    at the tensor core; `in_place`: P V is added to the output itself; `serial`: a warpgroup ends a
    tile before it begins the next, in fewer registers, with the scales of K loaded a tile `ahead`
    or when they are wanted; `shares`: the last blocks of queries are dealt out by tiles of keys
    where more than this part of the GPU would idle, 0 for never. (E4M3 codes of P follow the
    running maximum of a part then, as far from the emulator's as two roundings are.) `lag`, with
    `in_place`: probabilities may grow to 2^lag before the maximum that they refer to moves; `cap`,
    with `lag` and `serial`: where lengths of Q and K say that no score passes the maximum of the
    first tiles by more, no other tile has a maximum taken.
    """

    block_n: int
    warpgroups: int
    flush: int
    pieces: int = 1
    ones: bool = True
    polynomial: int = 0
    pingpong: bool = False
    in_place: bool = False
    serial: bool = False
    ahead: bool = False
    shares: float = 0.0
    lag: int = 0
    cap: int = 0

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """One warpgroup more, whose first warp copies."""
        return 128 * (self.warpgroups + 1)


@dataclass(frozen=True, slots=True)
class Options:
    """What a call turns on."""

    causal: bool = False
    window: bool = False
    key_mask: bool = False
    packed: bool = False
    out_half: bool = False
    split: bool = False
    raw_q: torch.dtype | None = None  # Q comes in this type, not as codes
    raw_v: bool = False  # V comes as the caller gave it


@dataclass(frozen=True, slots=True)
class Instance:
    """What is compiled for one kind of call. `value` counts the columns of V that it loads, and
    `row_bytes` those of a row of Q or K in shared memory, by which it is swizzled.
    """

    program: Program
    tile: Tile
    shared_bytes: int
    value: int
    row_bytes: int


def refusal(recipe: Recipe, head_dim: int, v_head_dim: int) -> str | None:
    """Why the kernel has no instance for this recipe and these head sizes; None when it has."""
    if recipe.pv not in ("e4m3", *HALVES) or recipe.qk_bits != 8 or recipe.smooth_q:
        return f"recipe {recipe.name} is not one of INT8 Q and K with FP8 or 16-bit P and V"
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

    What ran fastest on an H200 (benchmarks/h200_cuda_tiles.csv): three warpgroups that do one thing
    at a time where 65 to 128 columns leave registers for that; else overlap inside a warpgroup.
    """
    why = refusal(recipe, head_dim, v_head_dim)
    if why is not None:
        raise InvalidArgument(f"the CUDA kernel cannot run this call: {why}; use triton.*")
    small = max(head_dim, v_head_dim) <= 64
    wide = max(head_dim, v_head_dim) > 128
    flush = recipe.keys_per_flush
    if recipe.pv in HALVES:
        if flush is None and not wide:
            tile = Tile(128, 3, 128, ones=False, in_place=True, serial=True, ahead=small)
            if recipe.pv == "bf16":
                return replace(tile, lag=LAG, cap=CAP, shares=0.0 if small else FEW_IDLE)
            return tile if small else replace(tile, lag=LAG, shares=IDLE)
        if flush is None:
            return Tile(64, 2, 64, ones=False, pingpong=True, in_place=True)
        pieces = _pieces(v_head_dim, 4, HALF_PANEL)
        return Tile(64, 3 if small else 2, flush, pieces, ones=False)
    if flush in (None, 64, 128) and v_head_dim > 64 and not wide:
        return Tile(128, 3, flush or 128, serial=True, shares=IDLE)
    if flush is None:
        pieces = _pieces(v_head_dim, 2, V_PAD)
        if small:
            return Tile(64, 3, 64, pieces, pieces == 1)
        return Tile(64, 2, 64, pieces, pieces == 1, polynomial=2, pingpong=True)
    if flush > 128:
        return Tile(192, 2, flush, polynomial=2)
    polynomial = 1 if small else 2
    if flush == 128:
        return Tile(128, 3 if small else 2, flush, polynomial=polynomial, pingpong=not small)
    pieces = _pieces(v_head_dim, 4, V_PAD, 64 // flush)
    return Tile(64, 3 if small else 2, flush, pieces, pieces == 1, polynomial, not small)


def _pieces(v_head_dim: int, columns_a_register: int, unit: int, sums: int = 1) -> int:
    """The fewest parts of the value columns whose sums (`sums` of them in a tile of 64 keys) fit
    beside the output and the scores; several parts are multiples of `unit` columns.
    """
    scores_and_codes = 32 + 16
    for pieces in range(1, MOST_COLUMNS // V_PAD):
        value = _columns(v_head_dim, pieces, unit)
        taken = value // 2 + sums * value // pieces // columns_a_register + scores_and_codes
        if value <= MOST_COLUMNS and taken <= MOST_REGISTERS:
            return pieces
    raise AssertionError(f"no parts of {v_head_dim} columns fit")


def _columns(v_head_dim: int, pieces: int, unit: int) -> int:
    step = V_PAD if pieces == 1 else unit * pieces
    return -(-v_head_dim // step) * step


@cache
def instance(recipe: Recipe, head_dim: int, v_head_dim: int, options: Options) -> Instance:
    """The instance that serves a recipe, head sizes and options."""
    tile = pick(recipe, head_dim, v_head_dim)
    half_v = recipe.pv in HALVES
    head = -(-head_dim // QK_PAD) * QK_PAD
    value = _columns(v_head_dim, tile.pieces, HALF_PANEL if half_v else V_PAD)
    swizzle = 32 if head <= 32 else 64 if head <= 64 else 128
    row = swizzle * -(-head // 128)
    if half_v:
        v_bytes = tile.block_n * 128 * -(-value // HALF_PANEL)
    else:
        v_bytes = (value + 8 * tile.ones) * tile.block_n
    stage = tile.block_n * row + -(-v_bytes // 1024) * 1024
    raw_q = 0 if options.raw_q is None else tile.block_m * head * 2
    fixed = tile.block_m * row + raw_q + 1024
    stages = min(MOST_STAGES, (MOST_SHARED_BYTES - fixed) // stage)
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
        "BF16_V": int(recipe.pv == "bf16"),
        "HALF_T": int(recipe.accumulate == "fp16"),
        "ONES": int(tile.ones),
        "POLY": tile.polynomial,
        "PINGPONG": int(tile.pingpong),
        "IN_PLACE": int(tile.in_place),
        "SERIAL": int(tile.serial),
        "LAG": tile.lag,
        "CAP": tile.cap,
        "SCALES_AHEAD": int(tile.ahead),
        "CAUSAL": int(options.causal),
        "WINDOW": int(options.window),
        "KEY_MASK": int(options.key_mask),
        "PACKED": int(options.packed),
        "OUT_HALF": int(options.out_half),
        "SPLIT": int(options.split),
        "RAW_Q": {None: 0, torch.float16: 1, torch.bfloat16: 2}[options.raw_q],
        "RAW_V": int(options.raw_v),
        "SHARED_BYTES": shared_bytes,
    }
    made = Program("attention.cu", tuple(defines.items()))
    return Instance(made, tile, shared_bytes, value, swizzle)


# The recipes that this kernel can compute, fastest first on an H200 at head size 128. For tests and
# benchmarks: the catalogue says which serve.
SERVED = (
    *("sage2pp_8_d6", "sage2pp_8_d4", "sage2_8", "sage2_8b", "sage2_8b_k128", "sage2pp_8"),
    *("sage2pp_8_d1", "sage2_8_bf16", "sage1_b_f32", "sage1_b"),
)
