"""The mma.sync kernels compiled for every GPU that their records list, without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE, CUDA_MMA
from sagepatch.backends.cuda.build import TARGETS, compile_program, missing
from sagepatch.backends.cuda.launch import Layout
from sagepatch.backends.cuda_mma.attention import SIGNATURE
from sagepatch.backends.cuda_mma.instances import instances
from sagepatch.backends.cuda_mma.tiles import SHARED_BYTES, Options, instance, refusal
from sagepatch.dispatch import Request, select
from sagepatch.errors import InvalidArgument, VariantRefused
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import AttnSpec

pytestmark = pytest.mark.skipif(
    missing("sm_120a") is not None, reason="no NVRTC that compiles for sm_120a"
)

# Every target once, each with a recipe of its own.
ONE_EACH = {
    "sm_80": "sage1_b_f32",
    "sm_86": "sage2_4_f16",
    "sm_87": "sage1_vt",
    "sm_89": "sage2pp_8",
    "sm_90a": "sage2_8",
    "sm_120a": "sage2pp_8_d1",
    "sm_121a": "sage2pp_8",
}


@pytest.mark.parametrize("target", ONE_EACH)
def test_every_target_compiles(target):
    made = instance(RECIPES[ONE_EACH[target]], 64, 64, target, Options())
    (kernel,) = compile_program(made.program).resources
    assert kernel.kernel == "mma_attention"
    # The E4M3 products of sm_90 are made of others, for tests only.
    assert kernel.stack_bytes == 0 or target == "sm_90a"
    assert kernel.registers * made.tile.threads * made.tile.resident <= 1 << 16
    assert tuple(size for _, size in kernel.params) == Layout.of(SIGNATURE).sizes


# One of each generation; the tests of the machine code's page compile others.
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120a"])
def test_what_build_compiles_spills_nothing(target):
    for program in instances(target):
        if not program.source.startswith("mma_"):
            continue
        made = compile_program(program)
        assert not made.log, made.log
        for kernel in made.resources:
            assert kernel.stack_bytes == 0, program.defines


@pytest.mark.parametrize("target", TARGETS.values())
def test_every_head_size_fits_in_shared_memory(target):
    for variant in CUDA_MMA:
        for dim in (8, 64, 80, 128, 160, 192, 256):
            if dim > variant.head_dims[1]:
                continue
            made = instance(variant.recipe, dim, dim, target, Options())
            assert made.shared_bytes <= SHARED_BYTES[target]
            assert made.tile.resident * (made.shared_bytes + 1024) <= SHARED_BYTES[target] + 1024


def test_build_lists_every_kernel_for_every_gpu_of_its_record():
    for arch, target in TARGETS.items():
        served = [v for v in CUDA_MMA if v.archs is not None and arch in v.archs]
        programs = instances(target)
        for variant in served:
            assert instance(variant.recipe, 64, 64, target, Options()).program in programs
        assert bool(programs) == bool(served)


def test_what_no_instance_has_is_refused_in_words():
    assert refusal(RECIPES["sage2_8"], 128, 128) is None
    assert "over 256" in (refusal(RECIPES["sage2_8"], 264, 64) or "")
    assert "192 keys a sum" in (refusal(RECIPES["sage2pp_8_d6"], 64, 64) or "")
    with pytest.raises(InvalidArgument, match="192 keys"):
        instance(RECIPES["sage2pp_8_d6"], 64, 64, "sm_89", Options())


def spec(arch: int) -> AttnSpec:
    return AttnSpec(1, 8, 8, 8192, 8192, 128, 128, "bf16", "bf16", "cuda", arch)


# By instruction rates: docs/kernels-mma.md.
@pytest.mark.parametrize(
    ("arch", "first"),
    [
        (80, "cuda_mma.sage1_b_f32"),
        (86, "cuda_mma.sage1_b"),
        (89, "cuda_mma.sage2pp_8"),
        (120, "cuda_mma.sage2pp_8"),
    ],
)
def test_defaults_follow_instruction_rates_once_the_kernels_have_run(arch, first):
    released = tuple(replace(variant, withheld=None) for variant in CATALOGUE)
    chosen = select(spec(arch), Request("auto"), lambda variant: None, released)
    assert chosen.variant.name == first
    today = select(spec(arch), Request("auto"), lambda variant: None)
    assert today.variant.toolchain == "triton"


def test_hopper_runs_them_by_full_name_only():
    for variant in CUDA_MMA:
        (reason,) = variant.rejects(spec(90))
        assert "by full name only, for tests" in reason
        assert variant.rejects(spec(90), by_full_name=True) == ()
        assert variant.rejects(spec(100), by_full_name=True) != ()
    asked = select(spec(90), Request("cuda_mma.sage2_4"), lambda variant: None)
    assert asked.variant.name == "cuda_mma.sage2_4"
    auto = select(spec(90), Request("fast"), lambda variant: None)
    assert auto.variant.toolchain != "cuda_mma"


def test_what_has_not_run_is_withheld():
    for variant in CUDA_MMA:
        why = "since it was last changed" if variant.ran_on else "not yet been checked on a GPU"
        assert why in (variant.withheld or "")
    with pytest.raises(VariantRefused, match="not yet been checked on a GPU"):
        select(spec(86), Request("sage2_4_f16"), lambda variant: None, CUDA_MMA)


def test_records_say_which_gpus_multiply_so():
    archs = {name: v.archs for name, v in BY_NAME.items() if v.toolchain == "cuda_mma"}
    assert archs["cuda_mma.sage2pp_8"] == {89, 120, 121}
    assert archs["cuda_mma.sage2pp_4"] == {89}
    assert archs["cuda_mma.sage2_4_f16"] == {80, 86, 87, 89}
    assert archs["cuda_mma.sage1_b"] == {80, 86, 87, 89, 120, 121}
    assert all(v.tested_on == {90} and 90 not in v.archs for v in CUDA_MMA)
