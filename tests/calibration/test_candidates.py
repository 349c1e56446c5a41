"""Which kernels calibration tries on a call, for any GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.layers import call, layer

from sagepatch.backends.catalogue import BY_NAME, CATALOGUE
from sagepatch.calibration import candidates
from sagepatch.calibration.candidates import candidate_variants, refused_by
from sagepatch.dispatch import Request, select
from sagepatch.spec import AttnSpec, MaskKind

HOPPER = AttnSpec(1, 24, 24, 4608, 4608, 128, 128, "bf16", "bf16", "cuda", 90)
ARCHS = sorted({arch for variant in CATALOGUE for arch in variant.archs or ()})
# What is emulated of a call for which there is no kernel that sums in BF16.
FOUR = ("sage2pp_8", "sage2_8", "sage1_b", "sage1_b_f32")


def emulated(spec: AttnSpec) -> list[str]:
    return [v.name for v in candidate_variants(spec, layer(emulate=True))]


class TestCandidates:
    """With every kernel released and none unusable."""

    @pytest.fixture
    def catalogue(self, monkeypatch):
        released = tuple(replace(variant, withheld=None) for variant in CATALOGUE)
        monkeypatch.setattr(candidates, "CATALOGUE", released)
        one = layer(emulate=False)
        one.unusable = lambda variant: None
        return one

    def test_an_h200_tries_a_few_of_each_tier(self, catalogue) -> None:
        names = [v.name for v in candidate_variants(HOPPER, catalogue)]
        tiers = [v.tier for v in candidate_variants(HOPPER, catalogue)]
        assert len(names) == len(set(names))
        assert tiers.count("fast") == 4
        assert tiers.count("safe") == 2
        assert all(name.startswith(("triton.", "cuda.")) for name in names)

    def test_an_ampere_gpu_without_fp8_still_has_a_fast_one(self, catalogue) -> None:
        tried = candidate_variants(replace(HOPPER, arch=86), catalogue)
        assert "fast" in {v.tier for v in tried}
        assert all(v.recipe.pv != "e4m3" for v in tried)

    @pytest.mark.parametrize("arch", [75, None])
    def test_a_gpu_that_nothing_serves_has_none(self, catalogue, arch) -> None:
        assert candidate_variants(replace(HOPPER, arch=arch), catalogue) == []

    # case 23
    @pytest.mark.parametrize("dtype", ["fp32", "fp64"])
    def test_wide_dtypes_have_none_unasked(self, catalogue, dtype: str) -> None:
        spec = replace(HOPPER, dtype=dtype, v_dtype=dtype)
        assert candidate_variants(spec, catalogue) == []
        assert catalogue.record.notes == [f"{dtype} stays exact unless a variant is asked for"]

    # case 5
    def test_a_head_size_that_nothing_serves_has_none(self, catalogue) -> None:
        assert candidate_variants(replace(HOPPER, head_dim=512, v_head_dim=512), catalogue) == []

    def test_a_cpu_tries_emulations_only_when_they_are_admitted(self) -> None:
        spec = call().spec()
        assert candidate_variants(spec, layer(emulate=False)) == []
        assert emulated(spec) == [f"emulated.{name}" for name in FOUR]

    def test_an_h200_tries_its_fastest_safe_kernels_of_each_dtype(self, catalogue) -> None:
        def safe(dtype: str) -> list[str]:
            spec = replace(HOPPER, dtype=dtype, v_dtype=dtype)
            return [v.name for v in candidate_variants(spec, catalogue) if v.tier == "safe"]

        assert safe("bf16") == ["cuda.sage2_8_bf16", "cuda.sage1_b_f32"]
        assert safe("fp16") == ["cuda.sage1_b_f32", "cuda.sage1_b"]

    @pytest.mark.parametrize("mask", [MaskKind.NONE, MaskKind.ADDITIVE], ids=["plain", "masked"])
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("arch", ARCHS)
    def test_what_the_catalogue_prefers_in_a_tier_is_tried(
        self, catalogue, arch: int, dtype: str, head_dim: int, mask: MaskKind
    ) -> None:
        sizes = {"head_dim": head_dim, "v_head_dim": head_dim}
        spec = replace(HOPPER, arch=arch, dtype=dtype, v_dtype=dtype, mask=mask, **sizes)
        tried = candidate_variants(spec, catalogue)
        for tier in ("fast", "safe"):
            chosen = select(spec, Request(tier), catalogue.unusable).variant
            assert chosen.name in {v.name for v in tried}
        # No more than before it was put first: each costs time.
        for tier, most in candidates.MOST_OF_TIER.items():
            assert 0 < sum(v.tier == tier for v in tried) <= most

    def test_where_the_first_fails_its_check_the_next_takes_its_place(
        self, catalogue, monkeypatch
    ) -> None:
        first = "cuda.sage2_8_bf16"
        lies = {first: "computes something else"}
        monkeypatch.setattr(candidates, "failure", lambda variant, gpu: lies.get(variant.name))
        tried = candidate_variants(HOPPER, catalogue)
        safe = [v.name for v in tried if v.tier == "safe"]
        assert safe == ["cuda.sage1_b_f32", "cuda.sage1_b"]

    def test_bf16_sums_are_emulated_for_what_has_a_kernel_of_them(self) -> None:
        spec = call().spec()
        for dtype in ("fp16", "fp32", "fp64"):
            assert emulated(replace(spec, dtype=dtype, v_dtype=dtype))[3] == (
                "emulated.sage1_b_f32"
            )
        assert emulated(replace(spec, dtype="bf16", v_dtype="bf16"))[2:] == [
            "emulated.sage1_b",
            "emulated.sage2_8_bf16",
        ]

    def test_what_cannot_serve_a_call_is_refused_for_cause(self, catalogue) -> None:
        def refused(spec) -> set[str]:
            tried = candidate_variants(spec, catalogue)
            return set(refused_by(spec, catalogue, tried))

        plain, masked = refused(HOPPER), refused(replace(HOPPER, mask=MaskKind.ADDITIVE))
        tried = {v.name for v in candidate_variants(HOPPER, catalogue)}
        # Kernels of Hopper's own take no such mask; those that were not reached are not refused.
        assert {name for name in tried if name.startswith("cuda.")} <= masked - plain
        assert not tried & plain
        assert all(BY_NAME[name].recipe.name in candidates.CANDIDATE_RECIPES for name in masked)
        # Not unasked: all of them.
        wide = refused(replace(HOPPER, dtype="fp32", v_dtype="fp32"))
        assert tried <= wide

    def test_given_recipes_replace_the_list(self) -> None:
        spec = call().spec()
        one = layer(emulate=True)
        tried = candidate_variants(spec, one, {"sage2_4"})
        assert [v.name for v in tried] == ["emulated.sage2_4"]
        assert candidate_variants(spec, one, set()) == []
