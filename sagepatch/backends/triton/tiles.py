"""Which tile a kernel runs with: a pure table of (architecture, kind of arithmetic, head size,
causal, mask) and the rule for what it does not list. Knows no tensors and no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from sagepatch.numerics.recipe import PvFormat, Recipe
from sagepatch.spec import MaskKind

# Scratch tensors are padded to whole tiles of this many tokens, the largest BLOCK_N of the table.
PAD = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """How one attention kernel is cut: queries and keys a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured entry: the tile for head sizes up to `head_dim`; None in a field means any."""

    arch: int
    pv: PvFormat
    head_dim: int
    tile: Tile
    causal: bool | None = None
    masked: bool | None = None


# Found by benchmarks/sweep_triton.py on an H200; rows for other architectures join when somebody
# runs it there. The first row that fits is taken.
TABLE: tuple[Row, ...] = (
    Row(90, "e4m3", 64, Tile(64, 128, 4, 3)),
    Row(90, "e4m3", 128, Tile(64, 128, 4, 3)),
    Row(90, "e4m3", 256, Tile(64, 64, 4, 3)),
    Row(90, "int8", 64, Tile(64, 128, 4, 3)),
    Row(90, "int8", 128, Tile(64, 128, 4, 3)),
    Row(90, "int8", 256, Tile(64, 64, 4, 3)),
    Row(90, "fp16", 64, Tile(64, 64, 4, 3)),
    Row(90, "fp16", 128, Tile(64, 64, 4, 3)),
    Row(90, "fp16", 256, Tile(64, 64, 4, 2)),
)


def is_tuned(arch: int) -> bool:
    """Whether the table was measured on this architecture; elsewhere the safe default serves."""
    return any(row.arch == arch for row in TABLE)


def pick(arch: int, recipe: Recipe, head_dim: int, causal: bool, mask: MaskKind) -> Tile:
    """The tile for one call; `head_dim` is the larger of D and Dv. Never refuses."""
    masked = mask is not MaskKind.NONE
    for row in TABLE:
        if (
            row.arch == arch
            and row.pv == recipe.pv
            and head_dim <= row.head_dim
            and row.causal in (None, causal)
            and row.masked in (None, masked)
        ):
            return fit(row.tile, recipe)
    return fit(_default(recipe, head_dim), recipe)


def fit(tile: Tile, recipe: Recipe) -> Tile:
    """`tile` with its keys cut to what the recipe allows: one flush of an FP16 accumulator, and one
    scale block, where the recipe has one.
    """
    keys = tile.block_n
    if recipe.keys_per_flush is not None:
        keys = min(keys, recipe.keys_per_flush)
    if recipe.k_granularity == "block":
        keys = min(keys, recipe.k_block)
    return Tile(tile.block_m, keys, tile.warps, tile.stages)


def _default(recipe: Recipe, head_dim: int) -> Tile:
    """A tile that fits 99 KB of shared memory, the least of the supported architectures."""
    if head_dim <= 64:
        return Tile(64, 64, 4, 3)
    if head_dim <= 128:
        return Tile(64, 64, 4, 2)
    return Tile(64, 32, 4, 2)


def pieces(dim: int, smallest: int) -> tuple[int, int]:
    """A head size as one or two powers of two that cover it, (large, small or 0).

    >>> pieces(80, 32), pieces(64, 32), pieces(8, 32)
    ((64, 32), (64, 0), (32, 0))
    """
    large = max(smallest, 1 << (dim.bit_length() - 1))
    rest = dim - large
    if rest <= 0:
        return large, 0
    small = max(smallest, 1 << (rest - 1).bit_length())
    # Two halves of the same size are one dot of twice the size.
    return (2 * large, 0) if small >= large else (large, small)


def v_pieces(dim: int, recipe: Recipe) -> tuple[int, int]:
    """As `pieces` for the head size of V. FP16 values are not split: with a second, narrow piece of
    FP16 columns an H200 met an illegal memory access (Triton 3.6), with 8-bit ones it did not.
    """
    if recipe.pv == "fp16":
        return max(16, 1 << (dim - 1).bit_length()), 0
    return pieces(dim, 16)
