"""Calls that may be known from one to the next: how often those that never are get looked at."""

from __future__ import annotations

import pytest
import torch

import sagepatch
from sagepatch import known
from sagepatch.backends import prepared
from sagepatch.bounded import Bounded


@pytest.fixture
def looked(monkeypatch):
    """The calls for which it was asked how they were launched."""
    asked: list[str] = []

    def find(toolchain, *rest):
        asked.append(toolchain)
        return prepared.find(toolchain, *rest)

    monkeypatch.setattr(known, "find", find)
    monkeypatch.setattr(known, "_TRIED", Bounded(4))
    monkeypatch.setattr(known, "_KNOWN", Bounded(4))
    return asked


def ask(length: int = 20, variant: str = "auto") -> None:
    q = torch.ones(1, 2, length, 32)
    sagepatch.attention(q, q, q, variant=variant)


# Once wrong: after each of them, at a cost of 17 us on a CPU.
@pytest.mark.parametrize("variant", ["auto", "exact", "emulated.sage2_8"])
def test_a_call_that_is_never_known_is_looked_at_ever_more_rarely(looked, variant: str) -> None:
    for _ in range(20):
        ask(variant=variant)
    assert len(looked) == 5
    assert not known._KNOWN


def test_each_kind_of_call_is_looked_at_and_few_are_remembered(looked) -> None:
    for length in range(10, 30):
        ask(length)
    assert len(looked) == 20
    assert len(known._TRIED) <= 4


def test_a_call_in_a_graph_says_nothing_of_others(looked, monkeypatch) -> None:
    monkeypatch.setattr(known, "capturing", lambda spec: True)
    for _ in range(3):
        ask()
    assert not looked
    assert not known._TRIED
