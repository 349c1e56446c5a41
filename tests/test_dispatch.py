"""Choosing: reasons, traces and rules, for any GPU, on a laptop."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.dispatch import Request, candidates, select
from sagepatch.errors import VariantRefused
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import AttnSpec, Call, MaskKind
from sagepatch.variant import Tolerance, Variant

CPU = AttnSpec(1, 8, 8, 8192, 8192, 64, 64, "bf16", "bf16", "cpu")
HOPPER = replace(CPU, device="cuda", arch=90)
PICKY = Variant(
    toolchain="triton",
    recipe=RECIPES["sage2_8"],
    entry="nowhere:run",
    devices=frozenset({"cuda"}),
    archs=frozenset({89, 90}),
    head_dims=(8, 128),
    dtypes=frozenset({"fp16", "bf16"}),
    tolerance=Tolerance(0.999, 0.05),
    masks=frozenset({MaskKind.NONE}),
    causal=False,
    window=False,
    softcap=False,
    sinks=False,
    packed=False,
    gqa=False,
    own_v_head_dim=False,
    lse=False,
)


def fine(variant: Variant) -> None:
    return None


def test_all_reasons_are_given_each_with_found_and_needed() -> None:
    spec = AttnSpec(
        1, 8, 2, 64, 64, 256, 128, "fp32", "fp32", "cuda", 75, MaskKind.BOOL, 0, 9,
        True, True, True, True,
    )  # fmt: skip
    reasons = PICKY.rejects(spec)
    assert len(reasons) == 13
    for wanted in ("sm_75", "sm_89 or sm_90", "fp32", "bf16 or fp16", "256", "8 to 128", "bool"):
        assert any(wanted in reason for reason in reasons)
    assert PICKY.rejects(HOPPER) == ()


# cases 56, 62
@pytest.mark.parametrize("arch", [75, 86, 90, 100, 103, 120])
def test_the_kernel_follows_the_device_of_the_call(arch: int) -> None:
    chosen = select(replace(HOPPER, arch=arch), Request(), fine, (PICKY, SDPA)).variant
    assert chosen is (PICKY if arch == 90 else SDPA)


def test_the_trace_names_every_candidate() -> None:
    selection = select(replace(HOPPER, arch=86), Request(), fine, (PICKY, SDPA))
    assert [d.variant for d in selection.decisions] == [PICKY, SDPA]
    assert selection.decisions[0].reasons == ("GPU is sm_86, needs sm_89 or sm_90",)


def test_what_cannot_run_here_is_never_chosen() -> None:
    def broken(variant: Variant) -> str | None:
        return "failed its check" if variant is PICKY else None

    assert select(HOPPER, Request(), broken, (PICKY, SDPA)).variant is SDPA
    with pytest.raises(VariantRefused, match="failed its check"):
        select(HOPPER, Request("sage2_8"), broken, (PICKY, SDPA))


def test_a_reason_that_many_kernels_share_is_told_once() -> None:
    # "fast" on a CPU was refused in 5,000 characters, one sentence for each of thirty kernels.
    with pytest.raises(VariantRefused) as caught:
        select(replace(CPU, mask=MaskKind.BOOL), Request("fast"), fine)
    assert re.search(r"; \d+ triton kernels: device is cpu, needs cuda; ", str(caught.value))
    assert str(caught.value).count("emulation is for accuracy") == 1
    assert len(str(caught.value)) < 500
    assert len(caught.value.reasons) > 20
    with pytest.raises(VariantRefused, match=r"call: triton\.sage2_8: GPU is sm_86"):
        select(replace(HOPPER, arch=86), Request("fast"), fine, (PICKY, SDPA))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_auto_keeps_wide_floats_exact(dtype: str) -> None:
    spec = replace(HOPPER, dtype=dtype, v_dtype=dtype)
    assert select(spec, Request(), fine).variant is SDPA


# case 67
def test_auto_keeps_short_calls_exact() -> None:
    assert select(replace(HOPPER, kv_len=77), Request(), fine, (PICKY, SDPA)).variant is SDPA
    assert select(HOPPER, Request(), fine, (PICKY, SDPA)).variant is PICKY


def test_emulation_is_never_a_surprise() -> None:
    assert select(CPU, Request(), fine).variant is SDPA
    assert select(CPU, Request(emulate=True), fine).variant.toolchain == "emulated"
    assert select(HOPPER, Request("emulated.sage1_b"), fine).variant.name == "emulated.sage1_b"
    decisions = candidates(replace(HOPPER, arch=75), Request("sage1_b"), fine)
    assert all(d.reasons for d in decisions)


def test_the_catalogue_is_sound() -> None:
    assert len(BY_NAME) == len({v.name for v in BY_NAME.values()})
    for variant in BY_NAME.values():
        assert variant.name == f"{variant.toolchain}.{variant.recipe.name}"
        assert variant.ran_on <= (variant.archs or variant.ran_on) | variant.tested_on
        assert ":" in variant.entry


def test_a_withheld_kernel_needs_its_full_name() -> None:
    held = replace(PICKY, withheld="its tests failed")
    assert select(HOPPER, Request(), fine, (held, SDPA)).variant is SDPA
    with pytest.raises(VariantRefused, match="withheld, by full name only: its tests failed"):
        select(HOPPER, Request("sage2_8"), fine, (held, SDPA))
    assert select(HOPPER, Request("triton.sage2_8"), fine, (held, SDPA)).variant is held


def test_no_kernel_that_has_not_passed_on_a_gpu_is_offered() -> None:
    for variant in BY_NAME.values():
        assert variant.devices != frozenset({"cuda"}) or variant.ran_on or variant.withheld


@pytest.mark.parametrize("k_dtype", ["fp32", "fp64"])
def test_keys_of_another_dtype_are_quantised_or_the_call_is_exact(k_dtype: str) -> None:
    # Before, a kernel was chosen for keys in FP64 that it then refused.
    spec = replace(CPU, device="cuda", arch=90, dtype="fp16", v_dtype="fp16", k_dtype=k_dtype)
    chosen = select(spec, Request(), lambda variant: None).variant
    assert (chosen is SDPA) is (k_dtype == "fp64")
    if k_dtype == "fp64":
        with pytest.raises(VariantRefused, match="dtype of k is fp64"):
            select(spec, Request("sage2_8"), lambda variant: None)


def test_a_description_tells_the_dtype_of_keys_apart() -> None:
    q = torch.zeros(1, 2, 8, 16, dtype=torch.float16)
    same, other = (Call(q, k, q, 1.0).spec() for k in (q, q.double()))
    assert (same.k_dtype, other.k_dtype) == (None, "fp64")
    assert same != other
