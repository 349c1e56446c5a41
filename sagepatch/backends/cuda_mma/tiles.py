"""Which instance of the mma.sync kernel (mma_attention.cu) serves a recipe, head sizes and a GPU:
tiles, shared memory, macros. Pure; compiles and launches nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from sagepatch.backends.cuda.build import Program
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import Recipe

# Queries of a block of threads: those that share a mean where Q is smoothed.
BLOCK_M = 128
MOST_HEAD_DIM = 256
# With tiles of 128 keys.
MOST_WIDE_HEAD_DIM = 128
# Q and K are padded to whole products: 32 bytes along the head.
ROW_UNIT_BYTES = 32
V_PAD = 8
# What the kernels' macros call things.
PV = {"e4m3": 0, "fp16": 1, "int8": 2}
SUM = {"fp32": 0, "fp16": 1, "int32": 2}
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
# Shared memory that a block of threads may have, by GPU (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_120a": 99 << 10,
    "sm_121a": 99 << 10,
}


@dataclass(frozen=True, slots=True)
class Tile:
    """How one instance works: everything but the options of a call.

    `block_n` keys a tile, `warps` of `m_tiles` times 16 query rows each, `resident` blocks of
    threads a multiprocessor, `v_stages` tiles of V in flight; `q_registers`: Q stays in registers;
    `in_place`: P V adds to the output itself.
    """

    block_n: int
    warps: int
    m_tiles: int
    resident: int
    v_stages: int = 2
    q_registers: bool = False
    in_place: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class Options:
    """What a call turns on that asks for an instance of its own. `mask` is 0 for none, 1 for bits
    of keys, 2 for bool, 3 for additive of `mask_type`, one of `TYPES`.
    """

    mask: int = 0
    mask_type: int = 0
    softcap: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """What is compiled for one kind of call on one kind of GPU."""

    program: Program
    tile: Tile
    shared_bytes: int


def refusal(recipe: Recipe, head_dim: int, v_head_dim: int) -> str | None:
    """What a recipe or its head sizes ask for that this kernel has not; None where it has all."""
    beyond = {
        f"{recipe.qk_bits}-bit Q and K": recipe.qk_bits not in (8, 4),
        f"{recipe.pv} values": recipe.pv not in PV,
        "smoothed V": recipe.smooth_v,
        "rotation": recipe.rotate,
        "row sums of rounded P": recipe.sum_quantised_p,
        f"a scale per {recipe.q_granularity} of Q": recipe.q_granularity not in ("token", "block"),
        f"a scale per {recipe.k_granularity} of K": recipe.k_granularity == "tensor",
        f"{recipe.keys_per_flush} keys a sum": (recipe.keys_per_flush or 64) > 128,
        f"blocks of {recipe.q_block} queries": recipe.q_block != BLOCK_M
        and (recipe.smooth_q or recipe.q_granularity == "block"),
    }
    found = [name for name, asked in beyond.items() if asked]
    if found:
        return f"recipe {recipe.name} asks for {', '.join(found)}, which cuda_mma has not"
    most = MOST_HEAD_DIM if (recipe.keys_per_flush or 64) <= 64 else MOST_WIDE_HEAD_DIM
    if max(head_dim, v_head_dim) > most:
        return f"head sizes {head_dim} and {v_head_dim} are over {most}, the most of this recipe"
    return None


@cache
def pick(recipe: Recipe, head_dim: int, v_head_dim: int, target: str) -> Tile:
    """The tile for a recipe, head sizes and a GPU. Raises `InvalidArgument` where there is none.

    Registers decide: with two tiles of 16 rows a warp, K and V are read from shared memory half as
    often, and two blocks of threads a multiprocessor fill each other's gaps; where that would
    leave registers in memory, eight warps take one tile each.
    """
    why = refusal(recipe, head_dim, v_head_dim)
    if why is not None:
        raise InvalidArgument(f"the mma.sync kernel cannot run this call: {why}")
    in_place = recipe.pv == "fp16" and recipe.accumulate == "fp32"
    block_n = 128 if recipe.keys_per_flush == 128 else 64
    largest = max(head_dim, v_head_dim)
    if block_n == 64 and (largest <= 64 or (largest <= 128 and _fits_twice(recipe, target))):
        return Tile(block_n, 4, 2, 2, in_place=in_place)
    # Where shared memory is the bound, what fits in registers is read once.
    q_registers = in_place and head_dim <= 128 and target in ("sm_80", "sm_87")
    for v_stages in (2, 1):
        tile = Tile(block_n, 8, 1, 1, v_stages, q_registers, in_place)
        if shared_bytes(recipe, head_dim, v_head_dim, tile) <= SHARED_BYTES[target]:
            return tile
    raise InvalidArgument(
        f"the mma.sync kernel cannot run this call: {recipe.name} with head sizes {head_dim} and "
        f"{v_head_dim} needs more shared memory than {target} has"
    )


def _fits_twice(recipe: Recipe, target: str) -> bool:
    """Whether the compiler keeps two tiles of 16 rows a warp of 128 columns in registers."""
    if recipe.pv != "e4m3" or recipe.qk_bits != 8 or recipe.k_granularity == "token":
        return False
    return recipe.depth == 2 or (recipe.depth is None and target == "sm_89")


def padded(recipe: Recipe, head_dim: int) -> int:
    """Columns of Q and K for a head size: whole products."""
    unit = ROW_UNIT_BYTES * 8 // recipe.qk_bits
    return -(-head_dim // unit) * unit


def shared_bytes(recipe: Recipe, head_dim: int, v_head_dim: int, tile: Tile) -> int:
    """Shared memory of a block of threads: Q, two tiles of K with what is one number a key, V."""
    row = padded(recipe, head_dim) * recipe.qk_bits // 8
    value = -(-v_head_dim // V_PAD) * V_PAD * (2 if recipe.pv == "fp16" else 1)
    numbers = (recipe.k_granularity == "token") + recipe.smooth_q
    k_tile = tile.block_n * (row + 4 * numbers)
    return BLOCK_M * row + 2 * k_tile + tile.v_stages * tile.block_n * value


@cache
def instance(
    recipe: Recipe, head_dim: int, v_head_dim: int, target: str, options: Options
) -> Instance:
    """The instance that serves a recipe, head sizes and options on a GPU."""
    tile = pick(recipe, head_dim, v_head_dim, target)
    shared = shared_bytes(recipe, head_dim, v_head_dim, tile)
    defines: dict[str, int | float | str] = {
        "HEAD": padded(recipe, head_dim),
        "VALUE_DIM": v_head_dim,
        "BLOCK_N": tile.block_n,
        "WARPS": tile.warps,
        "M_TILES": tile.m_tiles,
        "QK_BITS": recipe.qk_bits,
        "K_SCALES": int(recipe.k_granularity != "token"),
        "PV": PV[recipe.pv],
        "SUM": SUM[recipe.accumulate],
        "FLUSH": recipe.keys_per_flush or tile.block_n,
        "IN_PLACE": int(tile.in_place),
        "P_LOG2": f"{math.log2(recipe.p_range):.9f}f",
        "SMOOTH_Q": int(recipe.smooth_q),
        "SOFTCAP": int(options.softcap),
        "MASK": options.mask,
        "MASK_TYPE": options.mask_type,
        "V_STAGES": tile.v_stages,
        "RESIDENT": tile.resident,
        "Q_REGISTERS": int(tile.q_registers),
        "SHARED_BYTES": shared,
    }
    return Instance(Program("mma_attention.cu", tuple(defines.items()), target), tile, shared)
