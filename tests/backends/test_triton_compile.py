"""Every entry of the tile table, and the default of every other architecture, compiles and fits the
shared memory of the GPU that it is for. Needs no GPU.
"""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from sagepatch.backends.catalogue import TRITON  # noqa: E402
from sagepatch.backends.triton.tiles import TABLE, is_tuned, one_piece, pick, pieces  # noqa: E402
from sagepatch.spec import AttnSpec, MaskKind  # noqa: E402

INTERPRETED = bool(triton.knobs.runtime.interpret)
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
ARCHS = (80, 86, 89, 90, 100, 120)
DIMS = (64, 80, 128, 256)
CASES = [
    (arch, variant, dim)
    for arch in ARCHS
    for variant in TRITON
    if variant.archs is not None and arch in variant.archs
    for dim in DIMS
]
QUICK = [(90, v, 64) for v in TRITON if v.recipe.name in ("sage2_8b_k128", "sage1_b")]


def _attention_fits(arch, variant, dim, **options):
    from triton_compile import SHARED, build_attention

    mask = (MaskKind.NONE, MaskKind.BOOL, MaskKind.ADDITIVE)[options.get("mask", 0)]
    whole = one_piece(dim, dim, variant.recipe)
    tile = pick(arch, variant.recipe, dim, bool(options.get("causal")), mask, whole)
    kernel = build_attention(arch, variant.recipe, tile, dim, **options)
    assert kernel.metadata.shared <= SHARED[arch]
    return kernel.asm["ptx"]


@compiled
@pytest.mark.parametrize(
    ("arch", "variant", "dim"), QUICK, ids=lambda x: getattr(x, "name", str(x))
)
def test_hopper_kernels_use_its_matrix_units(arch, variant, dim):
    ptx = _attention_fits(arch, variant, dim)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in ptx or (
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in ptx
    )


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "variant", "dim"), CASES, ids=lambda x: getattr(x, "name", str(x))
)
def test_every_entry_compiles(arch, variant, dim):
    _attention_fits(arch, variant, dim)


OPTIONS = [
    {"causal": True, "window": True},
    {"mask": 1},
    {"mask": 2, "softcap": True},
    {"packed": True, "lse": True, "causal": True},
    {"sinks": True, "guard": True},
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_compiles(arch, options):
    name = "sage1_b" if arch < 89 else "sage2_8"
    variant = next(v for v in TRITON if v.recipe.name == name)
    _attention_fits(arch, variant, 128, **options)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_prepass_masks_and_fallback_compile(arch):
    from triton_compile import SHARED, build_prepass, build_rest

    kernels = build_rest(arch)
    for variant in TRITON:
        if variant.archs is not None and arch in variant.archs:
            for dim in (72, 256):
                kernels += build_prepass(arch, variant.recipe, dim, packed=dim == 72)
    assert all(kernel.metadata.shared <= SHARED[arch] for kernel in kernels)


@pytest.mark.parametrize("dim", range(8, 257))
def test_pieces_cover_a_head_with_powers_of_two(dim):
    large, small = pieces(dim, 16)
    assert large + small >= dim
    assert large + small < 2 * max(dim, 16)
    assert all(piece & (piece - 1) == 0 for piece in (large, small))


def test_only_measured_architectures_count_as_tuned():
    assert {row.arch for row in TABLE} == {90}
    assert is_tuned(90)
    assert not is_tuned(80)


@compiled
def test_the_length_of_one_key_is_no_constant():
    from sagepatch.backends.triton.kernel import attention, attention_of_one_key

    assert [p.name for p in attention_of_one_key.params if p.do_not_specialize] == ["kv_len"]
    assert not any(p.do_not_specialize for p in attention.params)
    assert attention_of_one_key.fn is attention.fn


@pytest.mark.parametrize("variant", TRITON, ids=lambda v: v.name)
def test_one_key_is_served(variant):
    spec = AttnSpec(1, 4, 2, 1, 1, 80, 80, "bf16", "bf16", "cuda", 90)
    assert not variant.rejects(spec)
