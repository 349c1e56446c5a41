"""The pre-pass of the CUDA C++ kernels: codes and scales of Q, K and V in two launches, from
tensors of any strides. No attention in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from sagepatch.backends import prepared
from sagepatch.backends.cuda.build import Program
from sagepatch.backends.cuda.launch import Kernel, load
from sagepatch.backends.cuda.prepass_form import (
    HALVES,
    MOST_HEAD_DIM,
    PAD,
    V_PAD,
    Form,
    form_of,
    macros,
    own_strides,
    qk_columns,
    reads_values,
    refusal,
)
from sagepatch.backends.links import Argument, Link, Moving, filled
from sagepatch.backends.prepared import values_of
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.prepass import LOG2E
from sagepatch.numerics.recipe import CODE_DTYPE, RECIPES, Recipe
from sagepatch.spec import Call


@dataclass(frozen=True, slots=True)
class Codes:
    """What attention reads. All tensors are contiguous; take sizes and strides from them.

    Sizes: Dp is D up to a multiple of 32, D8 is Dv up to a multiple of 8. `Nkp` is the rows of keys
    of one head: Skv up to a multiple of 128. In a packed call (B = 1) member i has its keys from
    row `(cu_seqlens_kv[i] // 128 + i) * 128` on, a multiple of 128, and Nkp is
    `(Skv // 128 + members) * 128`; queries stay where they are. `groups` is B, or in a packed call
    the members.

    Scores in base 2 are (q8 @ k8^T) * q_scale_log2 * k_scale, plus `shift_log2` of the query where
    it is asked for (it changes no softmax; a log-sum-exp, a soft cap and sinks need it). Rows of
    keys that nobody sees (past the end, hidden by the key mask) hold code 0, in V too; their scale
    is that of their group, 0 where the whole group is empty: attention must mask them itself. A
    group of zeros has codes and scale 0. NaN or infinity in a group makes its scale NaN and its
    codes arbitrary.
    """

    # [B, Hq, Sq, Dp] int8, columns D..Dp zero. In INT4 [B, Hq, Sq, Dp // 2], Dp a multiple of 64,
    # two columns a byte, the first in its low half. With a negative softmax scale the codes are
    # negated, so that scales are never negative and maxima of integer products are maxima of
    # scores.
    q8: Tensor
    # [B, Hq, Sq] fp32, carries |softmax scale| * log2(e), at most 1e16. Per token; a recipe with
    # blocks of queries repeats the block's scale.
    q_scale_log2: Tensor
    # [B, Hkv, Nkp, Dp] int8, the mean over seen keys subtracted; columns D..Dp zero. INT4 as q8.
    k8: Tensor
    # Granularity `thread`: [B, Hkv, Nkp // 64, 4] fp32, entry t of a block of 64 keys is the scale
    # of those with (key mod 8) // 2 == t. Granularity `block`: the same array, all values of a
    # block equal. Granularity `token`: [B, Hkv, Nkp] fp32, one a key. At most 1e15.
    k_scale: Tensor
    # FP8 and INT8 PV, else None: [B, Hkv, D8, Nkp] float8_e4m3fn or int8, V transposed. Inside each
    # 16 keys position 4t + j holds key 2t + (j & 1) + 8 (j >> 1), which makes the accumulator of
    # Q K^T the operand P. Rows Dv..D8 are zero.
    vt8: Tensor | None
    # FP16 and BF16 PV, else None: [B, Hkv, Nkp, D8] in key order, columns Dv..D8 zero.
    v16: Tensor | None
    # [groups, Hkv, D8] fp32: multiply the output's channels by it; columns Dv..D8 zero. None,
    # as the two above, where the attention reads V itself.
    v_scale: Tensor | None
    # [B, Hq, Sq] fp32, softmax scale * log2(e) * q . k_mean; None unless return_lse, softcap or
    # sinks.
    shift_log2: Tensor | None
    # [groups, Hkv, Dp] fp32, what was subtracted from K, columns D..Dp zero.
    k_mean: Tensor
    # Calls with a key mask, else None. [B, Nkp // 32] int32: bit j of word w is 1 where key
    # 32 w + j is seen, 0 past Skv.
    key_bits: Tensor | None
    # With `key_bits`: [B] int32, 1 + the last seen key, 0 where none is: tiles behind it are dead.
    kv_len: Tensor | None
    # Recipes that smooth Q, else None: [B, Hq, q blocks, Dp] fp32, the mean of each block of 128
    # queries, which was subtracted from them, times softmax scale * log2(e). Packed: blocks of
    # member i begin at cu_seqlens_q[i] // 128 + i.
    q_mean_log2: Tensor | None
    # BF16 PV, else None: [groups, Hkv] fp32, of each head the largest squared length of a key's
    # codes times its squared scale; NaN where a scale is.
    k_norm: Tensor | None


def prepare(call: Call, recipe: Recipe) -> Codes:
    """Quantise the tensors of `call` as `recipe` says, on the current stream of their device.

    Sq and Skv are at least 1; the only mask is one of keys ([B or 1, 1, 1, Skv] bool). Two
    launches; never waits for the device. Raises `InvalidArgument` for what `refusal` names, for
    other masks and for head sizes over 256.

    Making the tensors costs the host more than the launches: a caller that counts microseconds
    keeps the plan, and reads places in its scratch memory from `PrepassPlan.offsets`.
    """
    plan = plan_of(form_of(call, recipe))
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=call.q.device)
    plan.launch(call, scratch.data_ptr())
    return plan.codes(scratch)


# What a call brings: numbers in a list of arguments are passed as they are.
_FROM_CALL = {
    "q": Moving(prepared.Q),
    "k": Moving(prepared.K),
    "v": Moving(prepared.V),
    "seen": Moving(prepared.MASK),
    "cu_q": Moving(prepared.CU_Q),
    "cu_k": Moving(prepared.CU_K),
    "factor": Moving(prepared.FACTOR),
}
_STRIDES, _MASK, _SIZES = "{qqqq}", "{PqqPP}", "{" + "i" * 28 + "}"
# What Q becomes; with smoothed Q one place more.
_Q_OUT, _Q_OUT_SMOOTH = "{PPPf}", "{PPPfP}"
QUERIES = "P" + _STRIDES + _MASK + _SIZES + _Q_OUT + "Pi"
KEYS_AND_VALUES = "PPP" + 3 * _STRIDES + _MASK + _SIZES + _Q_OUT + "{PP}P{" + "P" * 11 + "f}"
# Tensors in the scratch memory begin at multiples of this, as torch's allocator gives addresses.
# TMA asks for 16 bytes; whole cache lines are good for the rest.
ALIGNMENT = 256
# Bytes that one block of threads reduces at least, and parts of a head at most.
CHUNK_BYTES = 64 << 10
MOST_CHUNKS = 64
# Parts of blocks of queries that several share: blocks of threads times their warpgroups.
MOST_PARTS = 1024
# Bytes of K or V between the statistics of a head and its codes: about what a large GPU has in
# flight.
BYTES_AHEAD = 600 * (32 << 10)


# The recipes whose codes wgmma can multiply. The pre-pass of the others serves the mma.sync kernels
# alone.
WGMMA_RECIPES = tuple(
    recipe
    for recipe in RECIPES.values()
    if not recipe.exact and refusal(recipe) is None and recipe.qk_bits == 8 and recipe.pv != "int8"
)


class PrepassPlan:
    """How calls of one form are prepared: machine code, sizes, places in the scratch memory."""

    def __init__(self, form: Form) -> None:
        recipe = form.recipe
        why = refusal(recipe)
        if why is not None:
            raise InvalidArgument(why)
        B, Hq, Sq, D = form.q
        Hkv, Skv = form.k[1], form.k[2]
        Dv = form.v_head_dim
        if not 1 <= max(D, Dv) <= MOST_HEAD_DIM:
            raise InvalidArgument(f"head sizes {D} and {Dv}; at most {MOST_HEAD_DIM} are served")
        self.form = form
        packed = form.members is not None
        self.groups = B if form.members is None else form.members
        dp, d8 = qk_columns(recipe, D), -(-Dv // V_PAD) * V_PAD
        row = dp * recipe.qk_bits // 8
        half_v = recipe.pv in HALVES
        blocks = Skv // PAD + self.groups if packed else -(-Skv // PAD)
        self.kv_pad = blocks * PAD
        q_blocks = Sq // PAD + self.groups if packed else -(-Sq // PAD)
        row_bytes = max(D, Dv) * form.dtypes[1].itemsize
        chunks = _chunks(blocks if form.members is None else -(-blocks // form.members), row_bytes)
        key_scales = self.kv_pad if recipe.k_granularity == "token" else self.kv_pad // 16
        f32, i32 = torch.float32, torch.int32
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
            "q8": None if form.raw_q else (torch.int8, (B, Hq, Sq, row)),
            "q_scale_log2": None if form.raw_q else (f32, (B, Hq, Sq)),
            "k8": (torch.int8, (B, Hkv, self.kv_pad, row)),
            "k_scale": (
                f32,
                (B, Hkv, key_scales)
                if recipe.k_granularity == "token"
                else (B, Hkv, key_scales // 4, 4),
            ),
            "vt8": None
            if half_v or form.raw_v
            else (CODE_DTYPE[recipe.pv], (B, Hkv, d8, self.kv_pad)),
            "v16": (CODE_DTYPE[recipe.pv], (B, Hkv, self.kv_pad, d8))
            if half_v and not form.raw_v
            else None,
            "v_scale": None if form.raw_v else (f32, (self.groups, Hkv, d8)),
            "shift_log2": (f32, (B, Hq, Sq)) if form.shift else None,
            "k_mean": (f32, (self.groups, Hkv, dp)),
            "key_bits": (i32, (B, self.kv_pad // 32)) if form.seen_strides else None,
            "kv_len": (i32, (B,)) if form.seen_strides else None,
            "q_mean_log2": (f32, (B, Hq, q_blocks, dp)) if recipe.smooth_q else None,
            "k_norm": (f32, (self.groups, Hkv)) if recipe.pv == "bf16" else None,
        }
        working: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {
            # Behind `k_norm` and one another, and zeroed together. `ready` is for the attention:
            # which parts of blocks of queries that several share are there.
            "progress": (i32, (self.groups, Hkv, 4)),
            "ready": (i32, (MOST_PARTS,)),
            "k_sum": (f32, (self.groups, Hkv, chunks, dp)),
            "k_count": (i32, (self.groups, Hkv, chunks)),
            "last_seen": (i32, (self.groups, chunks)),
            "v_peak": None if form.raw_v else (f32, (self.groups, Hkv, chunks, d8)),
            "v_inverse": None if form.raw_v else (f32, (self.groups, Hkv, d8)),
        }
        self.offsets: dict[str, int] = {}
        self.strides: dict[str, tuple[int, ...]] = {}
        at = 0
        for name, tensor in (self.tensors | working).items():
            if tensor is not None:
                self.offsets[name] = at
                dtype, shape = tensor
                at += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
                self.strides[name] = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        self.scratch_bytes = at
        q_work = B * Hq * q_blocks
        first_zero = "progress" if self.tensors["k_norm"] is None else "k_norm"
        zeros = (self.offsets["ready"] - self.offsets[first_zero]) // 4 + MOST_PARTS
        rows = B * Hkv
        read = 1 if form.raw_v else 2  # K, and V
        chunk_units = read * chunks * (self.groups if packed else 1)
        block_units = read * blocks
        ahead = min(rows, -(-BYTES_AHEAD // (block_units * PAD * row_bytes)))
        few = form.shift or form.raw_q
        self.queries_blocks = min(64, -(-zeros // 256)) if few else q_work
        self.keys_blocks = rows * (chunk_units + block_units) + (q_work if form.shift else 0)
        strides = [
            own_strides(s, n)
            for s, n in zip(
                (form.q_strides, form.k_strides, form.v_strides),
                (form.q, form.k, (*form.k[:3], Dv)),
                strict=True,
            )
        ]
        self.program = Program("prepass.cu", macros(form, strides), form.target)
        mask: list[int | float | str] = ["seen", *(form.seen_strides or (0, 0)), "cu_q", "cu_k"]
        by = (Hq, Hkv, chunks, q_blocks, chunk_units, block_units, chunk_units + block_units)
        sizes: list[int | float | str] = [
            *(self.groups, Hq // Hkv, Sq, Skv, self.kv_pad, rows, ahead),
            *(number for n in by for number in divisor(n)),
        ]
        q_out: list[int | float | str] = ["+q8", "+q_scale_log2", "+shift_log2", "factor"]
        if recipe.smooth_q:
            q_out.append("+q_mean_log2")
        self.queries_args = _moving(
            self.offsets,
            ["q", *strides[0], *mask, *sizes, *q_out, f"+{first_zero}", zeros],
        )
        self.keys_args = _moving(
            self.offsets,
            [
                *("q", "k", "v"),
                *(stride for of in strides for stride in of),
                *mask,
                *sizes,
                *q_out,
                *("+k8", "+k_scale"),
                "+v16" if half_v else "+vt8",
                *("+k_sum", "+k_count", "+last_seen", "+v_peak", "+k_mean", "+v_scale"),
                *("+v_inverse", "+progress", "+k_norm", "+key_bits", "+kv_len"),
                float(recipe.v_range),
            ],
        )

    @cached_property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """The two kernels, compiled and loaded when first wanted."""
        threads = 512 if max(self.form.q[3], self.form.v_head_dim) > 128 else 256
        q_out = _Q_OUT_SMOOTH if self.form.recipe.smooth_q else _Q_OUT
        return (
            load(self.program, "queries", QUERIES.replace(_Q_OUT, q_out), threads=threads),
            load(
                self.program,
                "keys_and_values",
                KEYS_AND_VALUES.replace(_Q_OUT, q_out),
                threads=threads,
                programmatic=True,
            ),
        )

    def launch(self, call: Call, scratch: int) -> None:
        """Fill the scratch memory at address `scratch` on the current stream of the tensors'
        device, which must be the current one.
        """
        queries, keys_and_values = self.kernels
        device = call.q.device.index
        values = values_of(call, scratch=scratch, factor=call.scale * LOG2E)
        queries(device, self.queries_blocks, *filled(self.queries_args, values))
        keys_and_values(device, self.keys_blocks, *filled(self.keys_args, values))

    def links(self) -> tuple[Link, Link]:
        """The two launches for a chain of a call's own."""
        queries, keys_and_values = self.kernels
        return (
            queries.link(self.queries_blocks, self.queries_args),
            keys_and_values.link(self.keys_blocks, self.keys_args),
        )

    def codes(self, scratch: Tensor) -> Codes:
        """The scratch memory as tensors."""
        found: dict[str, Tensor | None] = {}
        typed: dict[torch.dtype, Tensor] = {}
        for name, tensor in self.tensors.items():
            if tensor is None:
                found[name] = None
                continue
            dtype, shape = tensor
            if dtype not in typed:
                typed[dtype] = scratch.view(dtype)
            base = typed[dtype]
            at = base.storage_offset() + self.offsets[name] // dtype.itemsize
            found[name] = base.as_strided(shape, self.strides[name], at)
        return Codes(**found)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def plan_of(form: Form) -> PrepassPlan:
    """The plan of a form, remembered."""
    return PrepassPlan(form)


def instances(
    target: str,
    recipes: Iterable[Recipe] = WGMMA_RECIPES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    *,
    raw_q: bool = False,
) -> tuple[Program, ...]:
    """The programs that `sagepatch build` compiles ahead: common head sizes, every recipe's
    pre-pass, with and without a log-sum-exp; with `raw_q` for an attention that makes the codes of
    Q itself, and reads V itself, wherever it can.
    """
    found: dict[Program, None] = {}
    for recipe in recipes:
        for dtype in dtypes:
            for head_dim in (64, 128):
                for shift in (False, True):
                    shape = (1, 1, PAD, head_dim)
                    strides = (0, 0, head_dim, 1)
                    form = Form(
                        *(recipe, target, shape, shape, head_dim, strides, strides, strides),
                        *((dtype, dtype, dtype), True, None, None, shift),
                        raw_q=raw_q and not shift and recipe.q_granularity == "token",
                        raw_v=raw_q and reads_values(recipe, dtype),
                    )
                    found[plan_of(form).program] = None
    return tuple(found)


def _chunks(blocks: int, row_bytes: int) -> int:
    """Parts that the keys of one head are reduced in. A pure function, so that sums repeat."""
    per_chunk = -(-CHUNK_BYTES // (PAD * row_bytes))
    return max(1, min(MOST_CHUNKS, -(-blocks // per_chunk)))


def divisor(by: int) -> tuple[int, int, int]:
    """What the kernels divide a number n, 0 <= n < 2^31, by `by` with: (by, multiplier, shift), so
    that n // by is n * multiplier >> (32 + shift); multiplier 0 where `by` is 1. As int32.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication (PLDI 1994).
    """
    if by == 1:
        return 1, 0, 0
    shift = (by - 1).bit_length() - 1
    multiplier = -(-(1 << (32 + shift)) // by)
    return by, multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift


def _moving(offsets: dict[str, int], wanted: list[int | float | str]) -> tuple[Argument, ...]:
    """The arguments of a launch. Words name what the call brings; with a plus, a place in the
    scratch memory (0 if it has none).
    """
    found: list[Argument] = []
    for value in wanted:
        if not isinstance(value, str):
            found.append(value)
        elif not value.startswith("+"):
            found.append(_FROM_CALL[value])
        else:
            at = offsets.get(value[1:])
            found.append(0 if at is None else Moving(prepared.SCRATCH, at))
    return tuple(found)
