"""Records of kernels: each limit refuses on its own, and says what was found and what is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sagepatch.backends import load, missing_package, unusable
from sagepatch.backends.catalogue import CATALOGUE, SDPA
from sagepatch.numerics.recipe import RECIPES
from sagepatch.spec import AttnSpec, MaskKind
from sagepatch.variant import Tolerance, Variant

SPEC = AttnSpec(1, 8, 8, 2048, 2048, 64, 64, "bf16", "bf16", "cuda", 90)
NARROW = Variant(
    toolchain="triton",
    recipe=RECIPES["sage1_b"],
    entry="nowhere:run",
    devices=frozenset({"cuda"}),
    archs=frozenset({90}),
    head_dims=(16, 128),
    dtypes=frozenset({"fp16", "bf16"}),
    tolerance=Tolerance(0.999, 0.05),
    masks=frozenset({MaskKind.NONE, MaskKind.BOOL}),
    causal=False,
    window=False,
    softcap=False,
    sinks=False,
    packed=False,
    gqa=False,
    own_v_head_dim=False,
    lse=False,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu", "arch": None}, "device is cpu, needs cuda"),
        ({"arch": 86}, "GPU is sm_86, needs sm_90"),
        ({"arch": None}, "GPU is sm_None, needs sm_90"),
        ({"dtype": "fp32"}, "dtype is fp32, needs bf16 or fp16"),
        ({"k_dtype": "fp64"}, "dtype of k is fp64, needs bf16 or fp16 or fp32"),
        ({"v_dtype": "fp64"}, "dtype of v is fp64, needs bf16 or fp16"),
        ({"head_dim": 8, "v_head_dim": 8}, "head_dim is 8, needs 16 to 128"),
        ({"head_dim": 256, "v_head_dim": 256}, "head_dim is 256, needs 16 to 128"),
        ({"v_head_dim": 128}, "head_dim of v is 128, needs 64 as q"),
        ({"mask": MaskKind.ADDITIVE}, "mask is additive, needs bool or none"),
        ({"causal_offset": 0}, "call is causal, this kernel is not"),
        ({"window": 7}, "window is 7, needs none"),
        ({"softcap": True}, "call has a soft cap, needs none"),
        ({"sinks": True}, "call has sinks, needs none"),
        ({"packed": True}, "call is packed, needs one length a batch"),
        ({"kv_heads": 2}, "8 query heads share 2 key heads, needs equal counts"),
        ({"lse": True}, "call wants the log-sum-exp, this kernel has none"),
    ],
    ids=lambda x: str(x)[:32],
)
def test_each_limit_refuses_on_its_own(changes, reason: str) -> None:
    assert NARROW.rejects(SPEC) == ()
    assert reason in NARROW.rejects(replace(SPEC, **changes))


def test_a_gpu_that_no_test_ran_on_is_told() -> None:
    ran = replace(NARROW, ran_on=frozenset({80, 90}))
    assert ran.untried(90) is None
    assert ran.untried(89) == (
        "compiled, arithmetic checked on sm_80 or sm_90, not yet run on sm_89"
    )
    assert replace(NARROW, ran_on=frozenset()).untried(89) == "compiled, not yet run on sm_89"
    assert SDPA.untried(89) is None


def test_exact_attention_refuses_nothing() -> None:
    odd = replace(
        *(SPEC,),
        dtype="fp64",
        k_dtype="fp32",
        device="cpu",
        head_dim=520,
        v_head_dim=1,
        kv_heads=1,
        causal_offset=-3,
        window=2,
        softcap=True,
        sinks=True,
        packed=True,
        lse=True,
        kv_len=0,
    )
    assert SDPA.rejects(odd) == ()


@pytest.mark.parametrize("variant", CATALOGUE, ids=lambda v: v.name)
def test_every_record_s_code_is_where_it_says(variant: Variant) -> None:
    if missing_package(variant.needs) is not None:
        pytest.skip("its package is not installed")
    assert callable(load(variant.entry))


# case 63
def test_a_missing_package_is_a_reason_not_an_error() -> None:
    wanted = replace(NARROW, needs=("torch", "no_such_package_at_all"))
    said = "package no_such_package_at_all is not installed (pip install no_such_package_at_all)"
    assert missing_package(wanted.needs) == said
    assert unusable(wanted) == said
    assert unusable(replace(NARROW, needs=("torch",))) is None
