"""Which tile a kernel runs with: a pure table of (architecture, kind of arithmetic, head size,
causal, mask) and the rule for what it does not list. Knows no tensors and no Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sagepatch.numerics.recipe import PvFormat, Recipe
from sagepatch.spec import MaskKind

# Scratch tensors are padded to whole tiles of this many tokens, the largest BLOCK_N of the table.
PAD = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """How one attention kernel is cut: queries and keys a tile, warps, pipeline stages; `tma`:
    keys and values come through the copy engine (Hopper on, head sizes of one piece); `registers`
    caps those of a thread, so that one more block fits on a multiprocessor.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One measured entry: the tile for head sizes up to `head_dim`; None in a field means any."""

    arch: int
    pv: PvFormat
    head_dim: int
    tile: Tile
    causal: bool | None = None
    masked: bool | None = None


def _hopper() -> Iterator[Row]:
    eight_bit: tuple[PvFormat, ...] = ("e4m3", "int8")
    for pv in eight_bit:
        # Scores and sums of one width keep one layout; other masked tiles spill.
        yield Row(90, pv, 64, Tile(64, 64, 4, 3, tma=True), masked=True)
        yield Row(90, pv, 64, Tile(64, 64, 4, 3), masked=True)
        yield Row(90, pv, 128, Tile(64, 128, 4, 2, tma=True), masked=True)
        yield Row(90, pv, 64, Tile(64, 128, 4, 3, tma=True))
        yield Row(90, pv, 128, Tile(64, 128, 4, 2, tma=True, registers=168))
        yield Row(90, pv, 128, Tile(64, 128, 4, 3))
        yield Row(90, pv, 256, Tile(64, 64, 4, 2, tma=True))
        yield Row(90, pv, 256, Tile(64, 64, 4, 3))
    yield Row(90, "fp16", 64, Tile(64, 64, 4, 3, tma=True))
    yield Row(90, "fp16", 128, Tile(64, 64, 4, 2, tma=True))
    yield Row(90, "fp16", 128, Tile(64, 64, 4, 3))
    yield Row(90, "fp16", 256, Tile(64, 64, 4, 2, tma=True))
    yield Row(90, "fp16", 256, Tile(64, 64, 4, 2))


# Found by benchmarks/sweep_triton.py on an H200 (masked rows and head sizes above 128: by the
# registers of the compiled kernel alone); rows for other architectures join when somebody runs it
# there. The first row that fits is taken; a row with `tma` fits heads of one piece.
TABLE: tuple[Row, ...] = tuple(_hopper())


def is_tuned(arch: int) -> bool:
    """Whether the table was measured on this architecture; elsewhere the safe default serves."""
    return any(row.arch == arch for row in TABLE)


def pick(
    arch: int, recipe: Recipe, head_dim: int, causal: bool, mask: MaskKind, tma: bool = True
) -> Tile:
    """The tile for one call; `head_dim` is the larger of D and Dv, `tma` whether keys and values
    can come through the copy engine (`one_piece`). Never refuses.
    """
    masked = mask is not MaskKind.NONE
    for row in TABLE:
        if (
            row.arch == arch
            and row.pv == recipe.pv
            and head_dim <= row.head_dim
            and row.causal in (None, causal)
            and row.masked in (None, masked)
            and (tma or not row.tile.tma)
        ):
            return fit(row.tile, recipe)
    return fit(_default(recipe, head_dim), recipe)


def fit(tile: Tile, recipe: Recipe) -> Tile:
    """`tile` with its keys cut to what the recipe allows: one flush of an FP16 accumulator, one
    scale block, and 64 where the correction for a smoothed Q takes registers of its own.
    """
    keys = tile.block_n
    if recipe.keys_per_flush is not None:
        keys = min(keys, recipe.keys_per_flush)
    if recipe.k_granularity == "block":
        keys = min(keys, recipe.k_block)
    if recipe.smooth_q:
        keys = min(keys, 64)
    return tile if keys == tile.block_n else replace(tile, block_n=keys, registers=None)


def one_piece(head_dim: int, v_head_dim: int, recipe: Recipe) -> bool:
    """Whether keys and values of these head sizes are one piece each, wide enough for a copy."""
    whole = pieces(head_dim, 32)[1] == v_pieces(v_head_dim, recipe)[1] == 0
    return whole and min(head_dim, v_head_dim) >= 32


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
