"""One line of a paper's accuracy table, printed and computed: what benchmarks/papers_tables.py and
the tables that it takes from other files are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sagepatch.numerics.attention import emulate
from sagepatch.numerics.recipe import Recipe
from sagepatch.spec import Call


@dataclass(frozen=True, slots=True)
class Printed:
    """What a paper prints; None for what it does not."""

    cosine: float | None = None
    rel_l1: float | None = None
    rmse: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a paper's table: its setting, what is printed, and how we compute it. `over` says
    whether the mean of calls or the worst head of all is meant.
    """

    paper: str
    table: str
    setting: str
    printed: Printed
    run: Callable[[Call], Tensor]
    data: str
    over: str = "mean"


def by_recipe(recipe: Recipe) -> Callable[[Call], Tensor]:
    """The emulator of a recipe."""
    return lambda call: emulate(call, recipe)[0]
