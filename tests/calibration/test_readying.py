"""Kernels made ready side by side: all at once, each once, and what fails on the way."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
import torch
from models.layers import call

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import readying
from sagepatch.calibration.readying import make_ready
from sagepatch.errors import KernelUnavailable

NAMES = ("sage2_8", "sage1_b", "sage2pp_8")


@pytest.fixture
def kernels(monkeypatch):
    """Three kernels whose first use waits for the other two, and what ran."""
    gate = threading.Barrier(3, timeout=20)
    ran: list[str] = []

    def run(one, recipe):
        assert torch.is_inference_mode_enabled()
        gate.wait()
        ran.append(recipe.name)

    monkeypatch.setattr(sys.modules[__name__], "run", run, raising=False)
    entry = f"{__name__}:run"
    readying.load.cache_clear()
    yield [replace(BY_NAME[f"emulated.{name}"], entry=entry) for name in NAMES], ran
    readying.load.cache_clear()


def test_kernels_are_made_ready_side_by_side(kernels) -> None:
    variants, ran = kernels
    make_ready(variants, call(), workers=3)
    assert sorted(ran) == sorted(NAMES)


def test_one_that_fails_its_check_is_not_run(kernels, monkeypatch) -> None:
    variants, ran = kernels
    monkeypatch.setattr(readying, "failure", lambda variant: "wrong answer")
    make_ready(variants, call(), workers=3)
    assert ran == []


@pytest.mark.parametrize("error", [KernelUnavailable("too large"), torch.OutOfMemoryError("full")])
def test_one_that_cannot_serve_is_told_where_it_is_used(monkeypatch, error) -> None:
    asked = []

    def refusing(entry):
        def run(one, recipe):
            asked.append(recipe.name)
            raise error

        return run

    monkeypatch.setattr(readying, "load", refusing)
    make_ready([BY_NAME["emulated.sage2_8"]], call(), workers=1)
    assert asked == ["sage2_8"]


def test_what_a_kernel_raises_propagates_with_its_name(monkeypatch) -> None:
    def broken(entry):
        def run(one, recipe):
            raise RuntimeError("boom")

        return run

    monkeypatch.setattr(readying, "load", broken)
    with pytest.raises(RuntimeError, match="boom") as caught:
        make_ready([BY_NAME["emulated.sage2_8"]], call(), workers=1)
    assert caught.value.__notes__[0].startswith("raised by emulated.sage2_8, made ready for 1x2x")


def test_nothing_is_compiled_off_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(readying, "load", lambda entry: pytest.fail("ran a kernel"))
    make_ready([BY_NAME["emulated.sage2_8"]], call())
    make_ready([], call(), workers=2)
