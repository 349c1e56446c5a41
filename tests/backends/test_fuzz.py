"""Random calls on every GPU kernel by Hypothesis: shapes, strides, masks, dtypes, positions,
packing and poisoned memory; the same specs for each toolchain. Triton's kernels run through its
interpreter on a CPU; the CUDA kernels need a GPU.

SAGEPATCH_FUZZ sets the calls of a lane, SAGEPATCH_FUZZ_LANES the lanes of a kernel (a lane is what
it is compiled for), SAGEPATCH_FUZZ_FIRST the number of the first one, SAGEPATCH_FUZZ_SECONDS the
time that a lane may take after its first call, which compiles, SAGEPATCH_FUZZ_TALLY a file that
gets a line of JSON for each lane.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from fuzz_calls import EVERY_FAMILY, FAMILIES, Lane, Spec, lane_of, specs, steady
from fuzz_judges import judge, share
from hypothesis import HealthCheck, given, settings

from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.spec import arch_of
from sagepatch.variant import Variant

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
EXAMPLES = int(os.environ.get("SAGEPATCH_FUZZ", "20" if ON_GPU else "3"))
LANES = int(os.environ.get("SAGEPATCH_FUZZ_LANES", "1"))
FIRST = int(os.environ.get("SAGEPATCH_FUZZ_FIRST", "0"))
SECONDS = float(os.environ.get("SAGEPATCH_FUZZ_SECONDS", "60"))
TALLY = os.environ.get("SAGEPATCH_FUZZ_TALLY")
TOOLCHAINS = ("cuda", "triton", "cuda_mma") if ON_GPU else ("triton",)
# A CPU takes few recipes and short calls.
INTERPRETED_RECIPES = ("sage2_8", "sage2_8b_k128", "sage1_b", "sage2_4")
LONGEST_INTERPRETED = 140
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

pytestmark = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="runs on a GPU, or through test_triton_interpreter.py"
)


@cache
def _runs_here(variant: Variant) -> bool:
    if not ON_GPU:
        return variant.recipe.name in INTERPRETED_RECIPES
    arch = arch_of(DEVICE)
    return variant.archs is None or arch in variant.archs | variant.tested_on


def _kernels() -> list[Variant]:
    return [v for v in CATALOGUE if v.toolchain in TOOLCHAINS and _runs_here(v)]


def _lane(variant: Variant, number: int) -> Lane:
    """The first lane from `number` on that `variant` serves."""
    families = EVERY_FAMILY if variant.softcap else FAMILIES
    # The interpreter's bf16 arithmetic is wrong.
    names = [n for n in DTYPES if n in variant.dtypes and (ON_GPU or n != "bf16")]
    for turn in range(len(families)):
        lane = lane_of(number + turn, families, [DTYPES[name] for name in names])
        packed = "packed" in lane.options
        if max(lane.head_dim, lane.v_head_dim) > variant.head_dims[1]:
            continue
        if packed and not variant.packed:
            continue
        return steady(lane, number) if variant.toolchain == "triton" else lane
    raise AssertionError(f"no lane for {variant.name}")


def _cases() -> list[tuple[Variant, int]]:
    """The first lanes of every kernel, then the second ones; neighbours have different lanes."""
    kernels = _kernels()
    return [
        (variant, FIRST + turn * 11 + place * 5)
        for turn in range(LANES)
        for place, variant in enumerate(kernels)
    ]


def _shorter(lane: Lane) -> Lane:
    if ON_GPU:
        return lane
    most = LONGEST_INTERPRETED
    return replace(lane, q_len=(1, most), kv_len=(1, most), steady=False)


@pytest.mark.parametrize(
    ("variant", "number"), [pytest.param(v, n, id=f"{v.name}-{n}") for v, n in _cases()]
)
def test_any_call_is_as_near_its_reference_as_it_may_be(variant, number):
    lane = _shorter(_lane(variant, number))
    ran, worst, failed = 0, 0.0, []
    until = math.inf

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=not ON_GPU,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(spec=specs(lane))
    def every_call(spec: Spec) -> None:
        nonlocal ran, worst, until
        if time.monotonic() > until:
            return
        call = spec.call(DEVICE)
        ran += 1
        far = judge(variant.toolchain, call, variant.recipe)
        worst = max(worst, share(far))
        if ran == 1:
            until = time.monotonic() + SECONDS
        wrong = {name: (f, a) for name, (f, a) in far.items() if not f <= a}
        if wrong and ON_GPU:
            failed.append(f"{wrong} {spec}")  # and the others still run
        else:
            assert not wrong, wrong

    try:
        every_call()
    except Exception as error:
        failed.append(f"{type(error).__name__}: {str(error)[:300]}")
        raise
    finally:
        if TALLY:
            _note(variant, lane, ran, worst, failed)
    assert not failed, "\n".join(failed[:3])
    assert ran


def _note(variant: Variant, lane: Lane, ran: int, worst: float, failed: list[str]) -> None:
    line = {
        "kernel": variant.name,
        "lane": str(lane),
        "examples": ran,
        "worst": worst,
        "failures": len(failed),
        "failed": failed[:5],
    }
    assert TALLY
    with open(TALLY, "a") as file:
        file.write(json.dumps(line) + "\n")
