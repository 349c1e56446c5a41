"""Runs a call on the Hopper kernel (attention.cu): which instance, tensor maps, launch. The
pre-pass and the choice of a kernel are elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagepatch.backends.chain import Chain
from sagepatch.backends.cuda.attention_tiles import HALF_PANEL, Options, instance, pick
from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import Kernel, load, tensor_map
from sagepatch.backends.cuda.prepass import ALIGNMENT, MOST_PARTS, Codes, PrepassPlan, plan_of
from sagepatch.backends.cuda.prepass_form import HALVES, PAD, QK_PAD, V_PAD, form_of
from sagepatch.backends.cuda.raw_operands import raw_strides, raw_value_strides
from sagepatch.backends.links import Argument, Link, Moving, MovingMap, filled
from sagepatch.backends.positions import positions
from sagepatch.backends.prepared import (
    CU_K,
    CU_Q,
    FACTOR,
    FLAGS,
    LSE,
    OUT,
    SCRATCH,
    VALUES,
    Prepared,
    Q,
    V,
    addresses_of,
    again,
    serve,
    values_of,
)
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import CODE_DTYPE, Recipe
from sagepatch.spec import Call

# Keys and values of heads that run together are to stay in the L2 cache (50 MB on an H100).
SECTION_BYTES = 32 << 20
# Parameters of `attention` and `key_tiles`, as launch.Layout spells them.
SIGNATURE = "TTT" + "P" * 14 + "qqq" + "i" * 18 + "fP"
KEY_TILES_SIGNATURE = "PPPii"
KEY_TILES_THREADS = 1024


class Operands(NamedTuple):
    """Where what the pre-pass leaves lies, as addresses or as places that move with a call; 0 for
    what it does not leave. prepass.Codes says what is there.
    """

    q8: int | Moving  # or q itself, where the attention makes its codes
    k8: int | Moving
    values: int | Moving  # vt8 or v16
    q_scale_log2: int | Moving
    k_scale: int | Moving
    k_norm: int | Moving
    v_scale: int | Moving
    shift_log2: int | Moving
    key_bits: int | Moving
    ready: int | Moving  # zeros, one a part of a shared block and warpgroup

    @classmethod
    def of(cls, codes: Codes) -> Operands:
        """The addresses of tensors."""
        values = codes.vt8 if codes.vt8 is not None else codes.v16
        tensors = (
            *(codes.q8, codes.k8, values, codes.q_scale_log2, codes.k_scale, codes.k_norm),
            *(codes.v_scale, codes.shift_log2, codes.key_bits),
        )
        return cls._make([*(0 if t is None else t.data_ptr() for t in tensors), 0])

    @classmethod
    def in_scratch(cls, plan: PrepassPlan) -> Operands:
        """Places in the scratch memory, as a plan of the pre-pass lays them out."""
        values = "vt8" if "vt8" in plan.offsets else "v16"
        names = (values if name == "values" else name for name in cls._fields)
        found = (plan.offsets.get(name) for name in names)
        return cls._make([0 if at is None else Moving(SCRATCH, at) for at in found])


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a call that its launch depends on, but for addresses."""

    recipe: Recipe
    device: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v_head_dim: int
    causal_offset: int | None
    window: int | None
    key_mask: bool
    members: int | None
    out_dtype: torch.dtype
    out_strides: tuple[int, ...]
    raw_q: tuple[torch.dtype, tuple[int, ...]] | None  # and strides, where it comes as it is
    raw_v: tuple[int, ...] | None  # strides, where it comes as it is

    @classmethod
    def of(
        cls,
        call: Call,
        recipe: Recipe,
        out: Tensor,
        raw_q: tuple[int, ...] | None = None,
        raw_v: tuple[int, ...] | None = None,
    ) -> Shape:
        """What of `call` and its output decides; `raw_q` from `raw_strides` where the attention is
        to make the codes of Q, `raw_v` from `raw_value_strides` where it is to read V.
        """
        return cls(
            recipe,
            out.device.index,
            tuple(call.q.shape),
            tuple(call.k.shape),
            call.v.shape[3],
            call.causal_offset,
            None if call.causal_offset is None else call.window,
            call.attn_mask is not None,
            None if call.cu_seqlens_q is None else call.cu_seqlens_q.numel() - 1,
            out.dtype,
            out.stride(),
            None if raw_q is None else (call.q.dtype, raw_q),
            raw_v,
        )


class Launch:
    """How calls of one shape are launched: kernel, grid, arguments but for addresses."""

    def __init__(self, shape: Shape) -> None:
        recipe, causal_offset = shape.recipe, shape.causal_offset
        B, Hq, Sq, D = shape.q
        Hkv, Skv, Dv = shape.k[1], shape.k[2], shape.v_head_dim
        tile = pick(recipe, D, Dv)
        packed = shape.members is not None
        members = shape.members or 1
        m_blocks = Sq // tile.block_m + members if packed else -(-Sq // tile.block_m)
        blocks = B * Hq * m_blocks
        processors = _processors(shape.device)
        self.tiles = -(-Skv // tile.block_n)
        plain = causal_offset is None and not shape.key_mask and not packed
        fits = processors * tile.warpgroups <= MOST_PARTS
        self.split = (
            plain
            and fits
            and tile.shares > 0
            and splits(blocks, self.tiles, processors, tile.shares)
        )
        made = instance(
            recipe,
            D,
            Dv,
            Options(
                causal=causal_offset is not None,
                window=shape.window is not None,
                key_mask=shape.key_mask,
                packed=packed,
                out_half=shape.out_dtype == torch.float16,
                split=self.split,
                raw_q=None if shape.raw_q is None else shape.raw_q[0],
                raw_v=shape.raw_v is not None,
            ),
        )
        self.shape, self.tile = shape, tile
        self.kernel = load(
            *(made.program, "attention", SIGNATURE),
            threads=tile.threads,
            shared_bytes=made.shared_bytes,
            programmatic=True,
        )
        self.key_tiles: Kernel | None = None
        if shape.key_mask and causal_offset is None:
            lists = Program("key_tiles.cu", (("BLOCK_N", tile.block_n),))
            self.key_tiles = load(
                lists, "key_tiles", KEY_TILES_SIGNATURE, threads=KEY_TILES_THREADS
            )
        self.grid = processors if self.split else min(blocks, processors)
        whole, share, rest, pieces = blocks, 0, 0, 0
        if self.split:
            whole = max(0, blocks // self.grid - 1) * self.grid
            share, rest = divmod((blocks - whole) * self.tiles, self.grid)
            pieces = 2 + share // self.tiles
        padded = (Skv // PAD + members) * PAD if packed else -(-Skv // PAD) * PAD
        self.words = padded // 32
        head, value = -(-D // QK_PAD) * QK_PAD, -(-Dv // V_PAD) * V_PAD
        half_v = recipe.pv in HALVES
        group = Hq // Hkv
        section = group * max(1, SECTION_BYTES // (padded * (head + value * (1 + half_v))))
        self.numbers = (
            *shape.out_strides[:3],
            *(B * Hq, Hq, group, Sq, Skv, m_blocks, whole, min(B * Hq, section)),
            *positions(causal_offset, shape.window, Sq + Skv),
            members,
            *(padded // 64, self.tiles, self.words, share, rest, pieces, 0),
        )
        # Scratch memory of its own, and where in it: numbers of live tiles and how many for a key
        # mask, parts of blocks of queries that several share.
        rows = B if self.key_tiles is not None else 0
        part_floats = self.grid * (made.value // 2 + 4) * 128 * tile.warpgroups
        self.own_places: list[int | None] = []
        self.scratch_bytes = 0
        for words in (rows * self.tiles, rows * 2, part_floats if self.split else 0):
            self.own_places.append(self.scratch_bytes if words else None)
            self.scratch_bytes += -(-4 * words // ALIGNMENT) * ALIGNMENT
        # Tensor maps: dtype, shape, strides, box, bytes of the swizzle.
        swizzle = made.row_bytes
        keys = 64 if tile.block_n % 128 else 128
        i8 = torch.int8
        self.maps = (
            _packed(i8, (B * Hq, Sq, head), (1, tile.block_m, swizzle), swizzle)
            if shape.raw_q is None
            else (shape.raw_q[0], shape.q, shape.raw_q[1], (1, 1, tile.block_m, head), 0),
            _packed(i8, (B * Hkv, padded, head), (1, tile.block_n, swizzle), swizzle),
            (
                *(CODE_DTYPE[recipe.pv], (B, Hkv, Skv, Dv), shape.raw_v),
                *((1, 1, tile.block_n, HALF_PANEL), 128),
            )
            if shape.raw_v is not None
            else _packed(
                *(CODE_DTYPE[recipe.pv], (B * Hkv, padded, value)),
                *((1, tile.block_n, HALF_PANEL), 128),
            )
            if half_v
            else _packed(
                torch.float8_e4m3fn, (B * Hkv, value, padded), (1, made.value, keys), keys
            ),
        )

    def __call__(self, call: Call, operands: Operands, out: Tensor, lse: Tensor | None) -> None:
        """Launch on the current stream of the device of `out`, which must be the current one."""
        device = self.shape.device
        own = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=out.device)
        values = values_of(
            call,
            out=out.data_ptr(),
            lse=0 if lse is None else lse.data_ptr(),
            scratch=own.data_ptr(),
            factor=call.scale * LOG2E,
        )
        for kernel, blocks, args in self._launches(operands, 0):
            kernel(device, blocks, *filled(args, values))

    def links(self, operands: Operands, own: int) -> list[Link]:
        """The launches for a chain of a call's own, whose scratch memory has `scratch_bytes` free
        from `own` on.
        """
        if self.shape.raw_q is not None:
            operands = operands._replace(q8=Moving(Q))
        if self.shape.raw_v is not None:
            operands = operands._replace(values=Moving(V))
        return [kernel.link(blocks, args) for kernel, blocks, args in self._launches(operands, own)]

    def _launches(
        self, operands: Operands, own: int
    ) -> list[tuple[Kernel, int, tuple[Argument, ...]]]:
        """Kernel, blocks and arguments of each launch; operands are addresses, or places."""
        listed, counts, parts = (
            0 if at is None else Moving(SCRATCH, own + at) for at in self.own_places
        )
        found: list[tuple[Kernel, int, tuple[Argument, ...]]] = []
        if self.key_tiles is not None:
            lists = (operands.key_bits, listed, counts, self.tiles, self.words)
            found.append((self.key_tiles, self.shape.q[0], lists))
        packed = self.shape.members is not None
        args = (
            *self._maps(operands),
            *operands[3:8],
            *((Moving(CU_Q), Moving(CU_K)) if packed else (0, 0)),
            listed,
            counts,
            operands.key_bits,
            Moving(OUT),
            Moving(LSE),
            parts,
            operands.ready,
            *self.numbers,
            Moving(FACTOR),
            Moving(FLAGS),
        )
        return [*found, (self.kernel, self.grid, args)]

    def _maps(self, operands: Operands) -> list[Argument]:
        """Tensor maps of Q, K and V."""
        made: list[Argument] = []
        for at, (dtype, shape, strides, box, swizzle) in zip(operands, self.maps, strict=False):
            form = (dtype, shape, strides, box, swizzle, 256)
            if isinstance(at, Moving):
                made.append(MovingMap(at.value, at.offset, partial(_encoded, form)))
            else:
                made.append(tensor_map(at, *form))
        return made


def _encoded(form: tuple[Any, ...], pointer: int) -> bytes:
    return tensor_map(pointer, *form)


def _packed(
    dtype: torch.dtype, shape: tuple[int, int, int], box: tuple[int, int, int], swizzle: int
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """The tensor map of a contiguous tensor."""
    return dtype, shape, (shape[1] * shape[2], shape[2]), box, swizzle


@lru_cache(maxsize=1024)
def launch_of(shape: Shape) -> Launch:
    """The launch of a shape, remembered."""
    return Launch(shape)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def splits(blocks: int, tiles: int, processors: int, idle_from: float) -> bool:
    """Whether the last blocks of queries are dealt out by tiles of keys: where whole ones would
    leave over `idle_from` of the GPU idle, and everybody gets enough tiles to pay for the putting
    together.
    """
    rounds = -(-blocks // processors)
    idle = 1 - blocks / (rounds * processors)
    return idle > idle_from and blocks * tiles >= 8 * processors


def run(call: Call, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Attention of `call` by `recipe` on an sm_90 device and the current stream there: two launches
    of the pre-pass, one of the attention, one more for a key mask. Never waits for the device.

    Output [B, Hq, Sq, Dv] in v's dtype and the order that the call asks for, and the natural
    log-sum-exp [B, Hq, Sq] fp32 where it asks for one. A query that sees no key gives 0 and -inf.
    """
    return _run(call, recipe, None)


def run_guarded(call: Call, recipe: Recipe, flags: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `run`, and where the result is not finite, which the kernel itself finds, the exact kernel
    of the Triton backend overwrites it, decided on the device: `triton.attention.run_guarded` says
    what `flags` are.
    """
    return _run(call, recipe, flags)


def _run(call: Call, recipe: Recipe, flags: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if 0 in call.q.shape or 0 in call.v.shape:
        out = call.empty_out().zero_()
        return out, call.empty_lse().fill_(-math.inf) if call.return_lse else None
    return serve("cuda", _begin, call, recipe, flags)


def _begin(
    call: Call, recipe: Recipe, flags: Tensor | None
) -> tuple[Tensor, Tensor | None, Prepared | None]:
    """The first call of a kind."""
    raw_q, raw_v = raw_strides(call, recipe), raw_value_strides(call, recipe)
    with torch.cuda.device(call.q.device):
        prepass = plan_of(form_of(call, recipe, raw_q=raw_q is not None, raw_v=raw_v is not None))
        launch = launch_of(Shape.of(call, recipe, call.empty_out(), raw_q, raw_v))
        own = prepass.scratch_bytes
        links = [*prepass.links(), *launch.links(Operands.in_scratch(prepass), own)]
        prepared = Prepared(Chain(links, VALUES), own + launch.scratch_bytes, call, recipe, LOG2E)
        out, lse = again(prepared, addresses_of(call), call.scale, flags)
        if flags is None:
            return out, lse, prepared
        from sagepatch.backends.triton.exact import links_where

        behind = links_where(flags, call, out, lse)
        if behind is None:
            return out, lse, None
        chain = Chain([*links, *behind], VALUES)
        return out, lse, Prepared(chain, prepared.scratch_bytes, call, recipe, LOG2E)


def attend(call: Call, recipe: Recipe, codes: Codes, out: Tensor, lse: Tensor | None) -> None:
    """Launch the attention over codes that are there already, into `out` and `lse`."""
    launch = launch_of(Shape.of(call, recipe, out))
    ready = torch.zeros(MOST_PARTS, dtype=torch.int32, device=out.device)
    launch(call, Operands.of(codes)._replace(ready=ready.data_ptr()), out, lse)
