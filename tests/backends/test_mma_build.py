"""The mma.sync kernels compiled for every GPU that their records list, without one."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from sagepatch.backends.catalogue import BY_NAME, CUDA_MMA
from sagepatch.backends.cuda.build import TARGETS, compile_program, missing
from sagepatch.backends.cuda.launch import Layout
from sagepatch.backends.cuda_mma.attention import SIGNATURE
from sagepatch.backends.cuda_mma.instances import instances, of_recipe, recipes
from sagepatch.backends.cuda_mma.tiles import SHARED_BYTES, Options, instance, refusal
from sagepatch.calibration.candidates import candidate_variants
from sagepatch.dispatch import Request, candidates, select
from sagepatch.errors import InvalidArgument
from sagepatch.layer import PatchedLayer, Policy
from sagepatch.numerics.recipe import RECIPES, TIERS
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
# A recipe at a time: all 82 kernels of one GPU take minutes where others compile, too.
GENERATIONS = ("sm_80", "sm_89", "sm_120a")


@cache
def own_programs(target):
    """The programs of each recipe that no recipe before it has, by recipe."""
    taken = {}
    for recipe in recipes(target):
        for program in of_recipe(recipe, target):
            if program.source.startswith("mma_"):
                taken.setdefault(program, recipe.name)
    by_recipe = {}
    for program, name in taken.items():
        by_recipe.setdefault(name, []).append(program)
    return by_recipe


@pytest.mark.parametrize("target", GENERATIONS)
def test_spills_are_looked_for_in_all_that_build_compiles(target):
    looked_at = [program for made in own_programs(target).values() for program in made]
    assert set(looked_at) == {p for p in instances(target) if p.source.startswith("mma_")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "recipe"),
    [(target, name) for target in GENERATIONS for name in own_programs(target)],
)
def test_what_build_compiles_spills_nothing(target, recipe):
    for program in own_programs(target)[recipe]:
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
        sources = {program.source for program in programs}
        four_bits = {"mma_means.cu"} if any(v.recipe.smooth_q for v in served) else set()
        every = {"prepass.cu", "mma_attention.cu", "mma_masks.cu"} | four_bits
        assert sources == (every if served else set())


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
        (87, "cuda_mma.sage1_b"),
        (89, "cuda_mma.sage2pp_8"),
        (120, "cuda_mma.sage2pp_8"),
        (121, "cuda_mma.sage2pp_8"),
    ],
)
def test_defaults_follow_instruction_rates(arch, first):
    chosen = select(spec(arch), Request("auto"), lambda variant: None)
    assert chosen.variant.name == first
    # The known answer may speak against it, and then another serves: Triton's, where it compiles.
    refused = {first: "known-answer check: off"}
    others = select(
        *(spec(arch), Request("auto"), lambda variant: None),
        prove=lambda variant: refused.get(variant.name),
    )
    assert others.variant.toolchain == ("cuda_mma" if arch == 121 else "triton")
    assert others.variant.recipe.qk_bits == 8
    assert others.decisions[0].reasons == (refused[first],)


def test_four_bits_are_the_tensor_core_s_where_it_has_them_and_never_chosen_unasked():
    for arch, recipe in ((80, "sage2_4_f16"), (86, "sage2_4_f16"), (89, "sage2pp_4")):
        asked = select(spec(arch), Request(recipe), lambda variant: None)
        assert asked.variant.name == f"cuda_mma.{recipe}"
    for arch in TARGETS:
        for request in ("auto", "fast", "safe"):
            found = candidates(spec(arch), Request(request), lambda variant: None)
            serving = [d.variant for d in found if not d.reasons and not d.variant.recipe.exact]
            by_tier = {
                tier: [v.recipe.qk_bits for v in serving if v.tier == tier] for tier in TIERS
            }
            assert all(bits == sorted(bits, reverse=True) for bits in by_tier.values())
            assert serving[0].recipe.qk_bits == 8


@pytest.mark.parametrize("request_", ["auto", *TIERS, *RECIPES])
def test_hopper_runs_them_by_full_name_only(request_):
    found = candidates(spec(90), Request(request_), lambda variant: None)
    ours = [d for d in found if d.variant.toolchain == "cuda_mma"]
    assert all("by full name only, for tests" in reason for d in ours for reason in d.reasons)
    assert all(d.reasons for d in ours)


def test_each_runs_on_hopper_by_its_full_name():
    for variant in CUDA_MMA:
        asked = select(spec(90), Request(variant.name), lambda variant: None)
        assert asked.variant is variant
        assert variant.rejects(spec(100), by_full_name=True) != ()


def test_a_plan_of_another_gpu_brings_none_to_hopper(monkeypatch):
    monkeypatch.setattr("sagepatch.calibration.candidates.failure", lambda variant, gpu: None)
    layer = PatchedLayer("", "self", Policy(), Request("exact"), lambda variant: None)
    tried = candidate_variants(spec(90), layer, set(RECIPES))
    assert {variant.toolchain for variant in tried} == {"cuda", "triton"}


@pytest.mark.parametrize("arch", [70, 75, 88, 100, 103, 110])
def test_no_gpu_that_nothing_is_compiled_for_is_served(arch):
    assert arch not in TARGETS
    for variant in CUDA_MMA:
        assert variant.rejects(spec(arch), by_full_name=True)
        assert variant.archs is not None
        assert variant.archs <= set(TARGETS)


def test_records_say_which_gpus_multiply_so():
    archs = {name: v.archs for name, v in BY_NAME.items() if v.toolchain == "cuda_mma"}
    assert archs["cuda_mma.sage2pp_8"] == {89, 120, 121}
    assert archs["cuda_mma.sage2pp_4"] == {89}
    assert archs["cuda_mma.sage2_4_f16"] == {80, 86, 87, 89}
    assert archs["cuda_mma.sage1_b"] == {80, 86, 87, 89, 120, 121}
    assert all(v.tested_on == {90} and 90 not in v.archs for v in CUDA_MMA)
    # What has run is what an H200 ran: the others are told as not yet run.
    assert all(v.ran_on == {90} and v.withheld is None for v in CUDA_MMA)
