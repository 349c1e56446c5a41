"""Tiny models of diffusers spread over processes by `enable_parallelism`, patched: the result is
that of one unpatched process, our op makes every call, and a restore leaves diffusers' own way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel.ranks import NCCL, on_ranks
from parallel.work import (
    ModelCase,
    ModelTold,
    compiled,
    each,
    on_device,
    one_model,
    run,
    self_calibrating,
)
from torch import Tensor

from sagepatch.patchers.parallel import RING_MASK

ULYSSES, RING = {"ulysses_degree": 2}, {"ring_degree": 2}
BOTH = {"ulysses_degree": 2, "ring_degree": 2}
EXACT, QUANTISED, KERNEL = "sdpa.exact", "emulated.sage2_8", "triton.sage2_8"
# What diffusers itself says of a ring over torch's SDPA: unpatched, no ring runs on a CPU.
NO_LSE = "ValueError: Native attention does not support return_lse=True"
# Of an emulated INT8 recipe on these models, over unpatched: ten times what one process loses.
QUANTISED_ERROR = 0.02


def unpatched(model: str) -> Tensor:
    return run(*on_device(model, "cpu"))


def check(case: ModelCase, told: list[ModelTold], calls: list[int]) -> None:
    expected = unpatched(case.model)
    for one in told:
        assert isinstance(one.out, Tensor), one.out
        if case.variant == "exact":
            torch.testing.assert_close(one.out, expected)
        else:
            error = ((one.out - expected).norm() / expected.norm()).item()
            assert 0 < error < QUANTISED_ERROR
        assert one.calls == calls
        served = EXACT if case.variant == "exact" else case.variant
        assert one.ran == {served: sum(calls)}
        assert not one.fallbacks
        assert not one.replaced
        assert one.names_left == 0
        if "ring_degree" in case.degrees:
            assert one.restored == NO_LSE
        else:
            assert isinstance(one.restored, Tensor)
            torch.testing.assert_close(one.restored, expected)
    assert all(torch.equal(one.out, told[0].out) for one in told[1:])


def test_flux_on_two_processes(tmp_path: Path) -> None:
    cases = [
        ModelCase("flux", ULYSSES, "exact"),
        ModelCase("flux", ULYSSES, QUANTISED, patch_first=False),
        ModelCase("flux", RING, "exact", patch_first=False),
        ModelCase("flux", RING, QUANTISED),
    ]
    ranks = on_ranks(2, each, tmp_path, one_model, cases)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        # A ring brings a layer the keys of each process in a call of their own.
        check(case, list(told), [2 if case.degrees == RING else 1] * 4)


# Wan's cross-attention reads the whole prompt on every process: nothing to exchange.
WAN_CALLS = {"ulysses": [1, 1, 1, 1], "ring": [2, 1, 2, 1]}


@pytest.mark.slow
def test_wan_and_qwen_on_two_processes(tmp_path: Path) -> None:
    cases = [
        ModelCase("wan", degrees, variant, patch_first)
        for degrees in (ULYSSES, RING)
        for variant in ("exact", QUANTISED)
        for patch_first in (True, False)
    ]
    cases += [
        ModelCase("flux", {**ULYSSES, "ulysses_anything": True}, QUANTISED),
        ModelCase("flux", {**RING, "ring_anything": True}, QUANTISED),
        # A mask over the keys, which each process holds for its own tokens.
        ModelCase("qwen", ULYSSES, "exact"),
        ModelCase("qwen", ULYSSES, QUANTISED, patch_first=False),
    ]
    ranks = on_ranks(2, each, tmp_path, one_model, cases)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        ring = "ring_degree" in case.degrees
        calls = WAN_CALLS["ring" if ring else "ulysses"]
        if case.model != "wan":
            calls = [2 if ring else 1] * (4 if case.model == "flux" else 2)
        check(case, list(told), calls)


@pytest.mark.slow
def test_a_text_mask_that_is_repeated_for_each_head(tmp_path: Path) -> None:
    # diffusers gives each process its heads of q, k and v, and all heads of the mask: unpatched,
    # torch refuses it.
    cases = [ModelCase("ltx", ULYSSES, variant, order) for variant, order in LTX_CASES]
    expected = unpatched("ltx")
    ranks = on_ranks(2, each, tmp_path, one_model, cases)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        for one in told:
            assert isinstance(one.out, Tensor), one.out
            error = ((one.out - expected).norm() / expected.norm()).item()
            assert error < (1e-5 if case.variant == "exact" else QUANTISED_ERROR)
            assert not one.fallbacks
            assert one.calls == [1] * 4
            assert isinstance(one.restored, str)
            assert "must match" in one.restored


LTX_CASES = (("exact", True), (QUANTISED, False))


@pytest.mark.slow
def test_mask_in_a_ring_is_left_to_diffusers(tmp_path: Path) -> None:
    ranks = on_ranks(2, each, tmp_path, one_model, [ModelCase("qwen", RING, QUANTISED)])
    for (told,) in ranks:
        assert told.out == told.restored == NO_LSE  # as it says unpatched
        assert told.fallbacks == {RING_MASK: 1}


@pytest.mark.slow
def test_ulysses_in_a_ring_on_four_processes(tmp_path: Path) -> None:
    cases = [
        ModelCase(model, BOTH, variant, patch_first)
        for model in ("flux", "wan")
        for variant, patch_first in (("exact", True), (QUANTISED, False))
    ]
    ranks = on_ranks(4, each, tmp_path, one_model, cases)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        check(case, list(told), WAN_CALLS["ring"] if case.model == "wan" else [2] * 4)


@pytest.mark.slow
def test_layers_calibrate_on_their_own_share(tmp_path: Path) -> None:
    cases = [ModelCase("flux", ULYSSES, "auto"), ModelCase("flux", RING, "auto")]
    expected = unpatched("flux")
    for told in on_ranks(2, each, tmp_path, self_calibrating, cases):
        for one in told:
            assert isinstance(one.restored, Tensor)
            torch.testing.assert_close(one.restored, expected)  # exact while it measures
            assert isinstance(one.out, Tensor)
            assert 0 < ((one.out - expected).norm() / expected.norm()).item() < QUANTISED_ERROR
            assert set(one.ran) - {EXACT}


@pytest.mark.slow
def test_compiled_whole_is_as_eager(tmp_path: Path) -> None:
    cases = [ModelCase("flux", ULYSSES, QUANTISED), ModelCase("flux", RING, QUANTISED)]
    ranks = on_ranks(2, each, tmp_path, compiled, cases)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        for one in told:
            torch.testing.assert_close(one.out, one.restored)
            assert one.calls == [4 if case.degrees == RING else 2] * 4  # eager, then compiled


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_flux_on_two_gpus(tmp_path: Path) -> None:
    cases = [
        ModelCase("flux", degrees, variant, patch_first)
        for degrees in (ULYSSES, RING)
        for variant, patch_first in (("exact", True), (QUANTISED, False), (KERNEL, True))
    ]
    ranks = on_ranks(2, each, tmp_path, one_model, cases, "cuda", **NCCL)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        expected = unpatched(case.model)
        for one in told:
            assert isinstance(one.out, Tensor), one.out
            error = ((one.out - expected).norm() / expected.norm()).item()
            assert error < (1e-3 if case.variant == "exact" else QUANTISED_ERROR)
            calls = 8 if case.degrees == RING else 4
            assert one.ran == {EXACT if case.variant == "exact" else case.variant: calls}
            assert not one.fallbacks


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_compiled_on_two_gpus(tmp_path: Path) -> None:
    cases = [ModelCase("flux", ULYSSES, KERNEL), ModelCase("flux", RING, KERNEL)]
    ranks = on_ranks(2, each, tmp_path, compiled, cases, "cuda", **NCCL)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        for one in told:
            torch.testing.assert_close(one.out, one.restored, rtol=1e-3, atol=1e-3)
            assert one.calls == [4 if case.degrees == RING else 2] * 4
            assert set(one.ran) == {KERNEL}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_ulysses_in_a_ring_on_four_gpus(tmp_path: Path) -> None:
    cases = [ModelCase("flux", BOTH, KERNEL), ModelCase("wan", BOTH, KERNEL, False)]
    ranks = on_ranks(4, each, tmp_path, one_model, cases, "cuda", **NCCL)
    for case, told in zip(cases, zip(*ranks, strict=True), strict=True):
        expected = unpatched(case.model)
        for one in told:
            assert isinstance(one.out, Tensor), one.out
            assert ((one.out - expected).norm() / expected.norm()).item() < QUANTISED_ERROR
            assert set(one.ran) == {KERNEL}
            assert not one.fallbacks
