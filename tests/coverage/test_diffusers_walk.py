"""Nothing in diffusers attends unseen: every class and function with signs of attention is reached
or listed with its reason, and so is every exported model. A new version of diffusers that adds one
fails here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import diffusers
import pytest
import torch
from diffusers_walk import (
    FUNCTIONS,
    IN_PART,
    NO_ATTENTION,
    SIGNS,
    UNREACHED,
    WRAPPERS,
    attending_functions,
    attends,
    everything,
    exported,
    hands_to_processor,
    kept_table,
    walked,
)
from torch import Tensor, nn

from sagepatch.patchers.code import calls_sdpa
from sagepatch.patchers.diffusers_processors import DISPATCH, Route, class_way

BUILT = [name for name in exported() if name not in WRAPPERS]


def is_processor(owner: type) -> bool:
    """Every processor class is classified in tests/patchers/test_diffusers_classes.py."""
    return "Processor" in owner.__name__ or "AttentionProc" in owner.__name__


def test_every_class_that_attends_is_reached_or_listed() -> None:  # case 37
    unreached, others = set(), set()
    for owner in everything():
        if not attends(owner) or is_processor(owner) or hands_to_processor(owner):
            continue
        if not issubclass(owner, nn.Module):
            others.add(owner.__name__)
        elif not calls_sdpa(owner):
            unreached.add(owner.__name__)
    assert unreached == UNREACHED.keys() | NO_ATTENTION.keys()
    # Guidance that waits for the call of SDPA, which it sees.
    assert others == {"AttentionScoreSkipFunctionMode"}


def test_every_function_that_attends_is_known() -> None:
    assert attending_functions().keys() == FUNCTIONS.keys()


def test_signs_are_found_where_they_are() -> None:
    assert {sign for owner in everything() for sign in attends(owner)} == SIGNS


class Tomorrow(nn.Module):
    """As a version of diffusers to come may write it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


class TomorrowsAttention(Tomorrow):
    """One that says what it is."""

    forward = Tomorrow.forward


@pytest.mark.parametrize("named", [False, True])
def test_class_of_tomorrow_is_found(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = TomorrowsAttention if named else Tomorrow

    class Holder(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(inner())

    assert attends(inner)
    assert not calls_sdpa(inner)
    monkeypatch.setattr(diffusers, "Holder", Holder, raising=False)
    walked.cache_clear()
    found = walked("Holder")
    walked.cache_clear()
    assert found.reached == 0
    if named:
        assert found.reasons == ("TomorrowsAttention computes its softmax by hand",)
    else:
        assert found.missed == ("Tomorrow",)


def asked_backends(owner: type) -> list[str]:
    """What the dispatcher calls in a class's own methods give as `backend`, as written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        next((ast.unparse(word.value) for word in call.keywords if word.arg == "backend"), "")
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == DISPATCH
    ]


def test_handles_arrive_where_processors_pass_their_backend_on() -> None:
    """A call that asks for another backend than the processor's own never sees our handle."""
    in_part = set()
    for owner in everything():
        if DISPATCH in attends(owner) and class_way(owner).route is Route.DISPATCH:
            asked = asked_backends(owner)
            assert "self._attention_backend" in asked, owner
            if set(asked) != {"self._attention_backend"}:
                in_part.add(owner.__name__)
    assert in_part == IN_PART.keys()


def test_every_exported_model_is_in_the_table() -> None:
    assert kept_table().keys() == set(BUILT)


def test_no_model_of_the_table_hides_attention() -> None:
    known = UNREACHED.keys() | NO_ATTENTION.keys()
    for name, row in kept_table().items():
        assert set(row["missed"].split()) <= known, name
        assert bool(int(row["left"])) == bool(row["reasons"]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_table_is_what_a_walk_finds(name: str) -> None:
    assert walked(name).row() == kept_table()[name]
