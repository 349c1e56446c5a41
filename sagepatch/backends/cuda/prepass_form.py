"""What of a call decides how it is quantised (`Form`), what the pre-pass refuses, and the macros of
prepass.cu. Compiles and launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sagepatch.backends.cuda.build import TARGETS
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import CODE_DTYPE, Recipe
from sagepatch.spec import Call, MaskKind, arch_of, mask_kind

# Scratch rows of keys start and end at multiples of this.
PAD = 128
# Rows of Q and K are padded with zero columns to multiples of this: k of wgmma and mma for INT8; to
# twice as many for INT4.
QK_PAD = 32
# Head sizes of V are padded to multiples of this: n of wgmma.
V_PAD = 8
MOST_HEAD_DIM = 256
# P and V in 16 bits.
HALVES = ("fp16", "bf16")
# Where the compiler wants more registers than three blocks of threads leave.
FEW_REGISTERS = ("sm_120a", "sm_121a")
_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class Form:
    """All of a call that its plan depends on."""

    recipe: Recipe
    target: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v_head_dim: int
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    aligned: bool
    seen_strides: tuple[int, int] | None
    members: int | None
    shift: bool
    raw_q: bool = False  # the attention makes the codes of Q
    raw_v: bool = False  # the attention reads V itself


def refusal(recipe: Recipe) -> str | None:
    """What a recipe asks for that this pre-pass does not do; None when it does all."""
    beyond = {
        f"{recipe.qk_bits}-bit Q and K": recipe.qk_bits not in (8, 4),
        f"smoothed blocks of {recipe.q_block} queries": recipe.smooth_q and recipe.q_block != PAD,
        "smoothed V": recipe.smooth_v,
        "unsmoothed K": not recipe.smooth_k,
        "rotation": recipe.rotate,
        f"{recipe.pv} values": recipe.pv not in ("e4m3", "fp16", "bf16", "int8"),
        f"a scale per {recipe.q_granularity} of Q": recipe.q_granularity not in ("token", "block"),
        f"a scale per {recipe.k_granularity} of K": recipe.k_granularity
        not in ("token", "block", "thread"),
        f"blocks of {recipe.q_block} queries": recipe.q_granularity == "block"
        and recipe.q_block != PAD,
        f"blocks of {recipe.k_block} keys": recipe.k_granularity == "block"
        and recipe.k_block not in (64, 128),
    }
    found = [name for name, asked in beyond.items() if asked]
    if not found:
        return None
    return f"recipe {recipe.name} asks for {', '.join(found)}, which the CUDA pre-pass has not"


def reads_values(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether an attention by `recipe` can take V of this type as it is: FP32 sums take FP16 of any
    magnitude.
    """
    return recipe.pv in HALVES and recipe.accumulate == "fp32" and CODE_DTYPE[recipe.pv] == dtype


def form_of(call: Call, recipe: Recipe, *, raw_q: bool = False, raw_v: bool = False) -> Form:
    """The part of a call that decides how it is prepared; with `raw_q` its queries are not, with
    `raw_v` its values are not.
    """
    q, k, v = call.q, call.k, call.v
    arch = arch_of(q.device)
    mask = call.attn_mask
    seen_strides = None
    if mask is not None:
        if mask_kind(mask) is not MaskKind.KEY_PADDING:
            raise InvalidArgument(
                f"attn_mask is {mask_kind(mask).value}; the CUDA kernels take masks of keys only, "
                "bool of shape [batch, 1, 1, keys]"
            )
        seen_strides = (
            mask.stride(0) if mask.shape[0] > 1 else 0,
            mask.stride(3) if mask.shape[3] > 1 else 0,
        )
    return Form(
        recipe,
        TARGETS.get(arch or 0, "sm_90a"),
        tuple(q.shape),
        tuple(k.shape),
        v.shape[3],
        q.stride(),
        k.stride(),
        v.stride(),
        (q.dtype, k.dtype, v.dtype),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
        seen_strides,
        None if call.cu_seqlens_kv is None else call.cu_seqlens_kv.numel() - 1,
        call.return_lse or call.softcap is not None or call.sinks is not None,
        raw_q,
        raw_v,
    )


def qk_columns(recipe: Recipe, head_dim: int) -> int:
    """Columns of the codes of Q and K."""
    unit = QK_PAD * 8 // recipe.qk_bits
    return -(-head_dim // unit) * unit


def own_strides(strides: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with those of axes of one element, which may be anything, at 0."""
    return tuple(s if n > 1 else 0 for s, n in zip(strides, shape, strict=True))


def macros(form: Form, strides: list[tuple[int, ...]]) -> tuple[tuple[str, int | float | str], ...]:
    """The macros of prepass.cu."""
    recipe = form.recipe
    beyond = [str(dtype) for dtype in form.dtypes if dtype not in _TYPES]
    if beyond:
        raise InvalidArgument(f"{beyond[0]} tensors; the CUDA kernels take fp16, bf16 and fp32")
    D, Dv = form.q[3], form.v_head_dim
    vectors = (
        form.aligned
        and D % 8 == 0
        and Dv % 8 == 0
        and all(
            last == 1 and all(step * dtype.itemsize % 16 == 0 for step in rest)
            for (*rest, last), dtype in zip(strides, form.dtypes, strict=True)
        )
    )
    return (
        *zip(("Q_TYPE", "K_TYPE", "V_TYPE"), (_TYPES[d] for d in form.dtypes), strict=True),
        ("HEAD", D),
        ("V_HEAD", Dv),
        ("VECTORS", int(vectors)),
        ("Q_BLOCK", int(recipe.q_granularity == "block")),
        ("K_GROUPS", {"token": 0, "block": 1, "thread": 4}[recipe.k_granularity]),
        ("K_BLOCK", recipe.k_block if recipe.k_granularity == "block" else 64),
        ("HALF_PV", int(recipe.pv in HALVES)),
        ("MASK", 2 if form.members is not None else int(form.seen_strides is not None)),
        ("SHIFT", int(form.shift)),
        *((("QK_BITS", 4),) if recipe.qk_bits == 4 else ()),
        *((("INT8_PV", 1),) if recipe.pv == "int8" else ()),
        *((("SMOOTH_Q", 1),) if recipe.smooth_q else ()),
        *((("RESIDENT_THREADS", 512),) if form.target in FEW_REGISTERS else ()),
        *((("RAW_Q", 1),) if form.raw_q else ()),
        *((("RAW_V", 1),) if form.raw_v else ()),
        *((("BF16_PV", 1), ("K_NORM", 1)) if recipe.pv == "bf16" else ()),
    )
