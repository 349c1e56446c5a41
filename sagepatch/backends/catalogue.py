"""The table of every kernel that sagepatch has, in the order of preference within a tier. Adding
one is a row here.
"""

from __future__ import annotations

from sagepatch.numerics.recipe import EXACT, RECIPES
from sagepatch.spec import MaskKind
from sagepatch.variant import Tolerance, Variant

_ANY_DEVICE = frozenset({"cpu", "cuda", "mps", "xpu"})
_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})

SDPA = Variant(
    toolchain="sdpa",
    recipe=EXACT,
    entry="sagepatch.backends.sdpa:run",
    devices=_ANY_DEVICE,
    archs=None,
    head_dims=(1, 65536),
    dtypes=_FLOATS,
    k_dtypes=_FLOATS,
    tolerance=Tolerance(cosine=1.0, rel_l1=0.0),
)

EMULATED = tuple(
    Variant(
        toolchain="emulated",
        recipe=recipe,
        entry="sagepatch.backends.emulated:run",
        devices=_ANY_DEVICE,
        archs=None,
        head_dims=(1, 512),
        dtypes=_FLOATS,
        k_dtypes=_FLOATS,
        tolerance=Tolerance(cosine=1.0, rel_l1=0.0),
    )
    for recipe in RECIPES.values()
    if not recipe.exact
)

# Where Triton lowers an INT8 dot to the matrix units; sm_103 has none worth the name. E4M3 starts
# with Ada.
_TRITON_ARCHS = frozenset({80, 86, 87, 89, 90, 100, 120})
_TRITON_E4M3_ARCHS = frozenset({89, 90, 100, 120})
# Fastest first, as measured on sm_90 (benchmarks/h200_attention.csv).
_TRITON_RECIPES = (
    "sage2_8b_k128",
    "sage2_8",
    "sage2pp_8_d4",
    "sage2_8b",
    "sage2pp_8",
    "sage2pp_8_d1",
    "sage1_vb",
    "sage1_vt",
    "sage2_4",
    "sage2pp_4",
    "sage2pp_4_d4",
    "sage2pp_4_d1",
    "sage1_b",
    "sage1_t",
    "sage1_b_f32",
    "sage1_t_f32",
    "sage2_4_f16",
)

TRITON = tuple(
    Variant(
        toolchain="triton",
        recipe=RECIPES[name],
        entry="sagepatch.backends.triton.attention:run",
        devices=frozenset({"cuda"}),
        archs=_TRITON_E4M3_ARCHS if RECIPES[name].pv == "e4m3" else _TRITON_ARCHS,
        head_dims=(8, 256),
        dtypes=frozenset({"fp16", "bf16", "fp32"}),
        tolerance=Tolerance(cosine=0.9999, rel_l1=0.01)
        if RECIPES[name].pv == "fp16"
        else Tolerance(cosine=0.9995, rel_l1=0.025),
        needs=("triton",),
        ran_on=frozenset({90}),
        note="4-bit codes travel as INT8: the accuracy of INT4, not its speed"
        if RECIPES[name].qk_bits == 4
        else None,
    )
    for name in _TRITON_RECIPES
)

# Fastest first at head size 128 on an H200 (benchmarks/h200_attention.csv).
_CUDA_RECIPES = (
    "sage2pp_8_d4",
    "sage2_8",
    "sage2_8b",
    "sage2pp_8_d6",
    "sage2pp_8",
    "sage2pp_8_d1",
    "sage2_8_bf16",
    "sage1_b_f32",
    "sage1_b",
)

CUDA = tuple(
    Variant(
        toolchain="cuda",
        recipe=RECIPES[name],
        entry="sagepatch.backends.cuda.attention:run",
        devices=frozenset({"cuda"}),
        archs=frozenset({90}),
        head_dims=(8, 256 if (RECIPES[name].keys_per_flush or 64) <= 64 else 128),
        # BF16 holds three bits less than the FP16 of the caller.
        dtypes=frozenset({"bf16"} if RECIPES[name].pv == "bf16" else {"fp16", "bf16"}),
        tolerance=Tolerance(cosine=0.9999, rel_l1=0.01)
        if RECIPES[name].pv in ("fp16", "bf16")
        else Tolerance(cosine=0.9995, rel_l1=0.025),
        masks=frozenset({MaskKind.NONE, MaskKind.KEY_PADDING}),
        softcap=False,
        sinks=False,
        # A tile of 192 keys reaches into the next member, whose NaN it would take in.
        packed=RECIPES[name].k_block <= 128,
        ran_on=frozenset({90}),
    )
    for name in _CUDA_RECIPES
)

# mma.sync kernels: where each multiplies in hardware. E4M3 starts with Ada, and INT4 has left the
# tensor cores with Hopper; sm_90 emulates both, right in value and slow, for tests.
_INT8_ARCHS = frozenset({80, 86, 87, 89, 120, 121})
_E4M3_ARCHS = frozenset({89, 120, 121})
_INT4_ARCHS = frozenset({80, 86, 87, 89})
# What goes first, by instruction rates: sums in FP16 double the rate of P V on GeForce; an A100 has
# the same rate for both, so that FP32 costs nothing.
_MMA_FIRST = {
    "sage2pp_8": _E4M3_ARCHS,
    "sage1_b": frozenset({86, 87}),
    "sage1_b_f32": frozenset({80}),
}
_MMA_RECIPES = (
    *("sage2pp_8", "sage2pp_8_d4", "sage2pp_8_d1", "sage2_8", "sage1_vb", "sage1_vt"),
    *("sage2pp_4", "sage2pp_4_d4", "sage2pp_4_d1", "sage2_4"),
    *("sage1_b", "sage1_t", "sage1_b_f32", "sage1_t_f32", "sage2_4_f16"),
)

CUDA_MMA = tuple(
    Variant(
        toolchain="cuda_mma",
        recipe=RECIPES[name],
        entry="sagepatch.backends.cuda_mma.attention:run",
        devices=frozenset({"cuda"}),
        archs=(_E4M3_ARCHS if RECIPES[name].pv == "e4m3" else _INT8_ARCHS)
        & (_INT4_ARCHS if RECIPES[name].qk_bits == 4 else _INT8_ARCHS),
        head_dims=(8, 256 if (RECIPES[name].keys_per_flush or 64) <= 64 else 128),
        dtypes=frozenset({"fp16", "bf16", "fp32"}),
        tolerance=Tolerance(cosine=0.9999, rel_l1=0.01)
        if RECIPES[name].pv == "fp16"
        else Tolerance(cosine=0.9995, rel_l1=0.025),
        tested_on=frozenset({90}),
        first_on=_MMA_FIRST.get(name, frozenset()),
        ran_on=frozenset({90}),
    )
    for name in _MMA_RECIPES
)

# Four bits come last: the error is large, and Triton's are INT8 to the tensor core.
_TRITON_8_BITS = tuple(variant for variant in TRITON if variant.recipe.qk_bits == 8)
_TRITON_4_BITS = tuple(variant for variant in TRITON if variant.recipe.qk_bits == 4)

CATALOGUE: tuple[Variant, ...] = (
    *CUDA,
    *_TRITON_8_BITS,
    *CUDA_MMA,
    *_TRITON_4_BITS,
    *EMULATED,
    SDPA,
)
BY_NAME: dict[str, Variant] = {variant.name: variant for variant in CATALOGUE}
