"""The known-answer check against what lies in memory: a kernel that writes nothing, or leaves
some out, fails whoever answered before it and whatever block the allocator hands out.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from sagepatch.backends import selfcheck
from sagepatch.backends.catalogue import BY_NAME, CATALOGUE
from sagepatch.numerics.attention import emulate
from sagepatch.spec import Call

VARIANT = BY_NAME["triton.sage2_8"]
CPU = torch.device("cpu")


class Blocks:
    """An allocator that hands the block last freed of a size out again, and small ones from a pool
    of their own, as torch's does on a GPU.
    """

    def __init__(self, monkeypatch):
        self.taken = []
        monkeypatch.setattr(Call, "empty_out", lambda call: self.take(call.q.shape, call.v.dtype))
        monkeypatch.setattr(
            Call, "empty_lse", lambda call: self.take(call.q.shape[:3], torch.float32)
        )

    def take(self, shape, dtype):
        # Freed: nobody but this list knows it.
        for block in self.taken:
            if block.shape == shape and sys.getrefcount(block) <= 3:
                return block
        self.taken.append(torch.zeros(shape, dtype=dtype))
        return self.taken[-1]


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    known = selfcheck.known_call
    monkeypatch.setattr(
        selfcheck, "known_call", lambda device, *dim, **seed: known(CPU, *dim, **seed)
    )
    return Blocks(monkeypatch)


def answers(call, recipe):
    out, lse = call.empty_out(), call.empty_lse()
    right, right_lse = emulate(call, recipe)
    return out.copy_(right), lse.copy_(right_lse)


def writes_nothing(call, recipe):
    return call.empty_out(), call.empty_lse()


# Once wrong: what lay there was the answer of the kernel checked before, and right.
@pytest.mark.parametrize("poisoned", [True, False], ids=["poisoned", "another allocator"])
def test_a_kernel_that_writes_nothing_fails_behind_one_that_answered(blocks, monkeypatch, poisoned):
    if not poisoned:
        monkeypatch.setattr(selfcheck, "poison", lambda call: None)
    monkeypatch.setattr(selfcheck, "load", lambda entry: answers)
    assert selfcheck._check(BY_NAME["triton.sage2_8b_k128"], 0) is None
    assert selfcheck._check(VARIANT, 0) is None
    monkeypatch.setattr(selfcheck, "load", lambda entry: writes_nothing)
    for name in ("triton.sage2_8b_k128", "triton.sage1_t"):
        if name != "triton.sage2_8b_k128" or poisoned:
            why = selfcheck._check(BY_NAME[name], 0) or ""
            assert ("not written" if poisoned else "cosine") in why


@pytest.mark.parametrize("poisoned", [True, False], ids=["poisoned", "another allocator"])
@pytest.mark.parametrize("left", ["part of a row", "the log-sum-exp of a row"])
def test_a_kernel_that_leaves_some_out_fails_behind_one_that_did_not(
    blocks, monkeypatch, left, poisoned
):
    if not poisoned:
        monkeypatch.setattr(selfcheck, "poison", lambda call: None)

    def most(call, recipe):
        out, lse = call.empty_out(), call.empty_lse()
        right, right_lse = emulate(call, recipe)
        kept, kept_lse = out[:, :, -1, 40:].clone(), lse[:, :, -1].clone()
        out.copy_(right)
        lse.copy_(right_lse)
        if left == "part of a row":
            out[:, :, -1, 40:] = kept
        else:
            lse[:, :, -1] = kept_lse
        return out, lse

    monkeypatch.setattr(selfcheck, "load", lambda entry: answers)
    assert selfcheck._check(VARIANT, 0) is None
    monkeypatch.setattr(selfcheck, "load", lambda entry: most)
    told = (
        ("not written" if poisoned else "in one row") if left == "part of a row" else "log-sum-exp"
    )
    assert told in (selfcheck._check(BY_NAME["triton.sage2_8b_k128"], 0) or "")


def test_no_two_kernels_are_asked_the_same():
    checked = [v for v in CATALOGUE if v.toolchain in selfcheck.CHECKED]
    calls = [call for v in checked for call in selfcheck.known_calls(v, CPU)]
    for tensor in ("q", "v"):
        asked = {tuple(getattr(call, tensor).flatten()[:8].tolist()) for call in calls}
        assert len(asked) == len(calls)
