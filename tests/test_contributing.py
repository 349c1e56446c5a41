"""docs/contributing.md names files and names that exist, and the lists that a change goes to agree
with one another.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from sagepatch.backends.catalogue import CATALOGUE
from sagepatch.backends.selfcheck import CHECKED
from sagepatch.bench.measure import FIRST, TOOLCHAINS
from sagepatch.calibration.candidates import CANDIDATE_RECIPES, EMULATED_FEW, EMULATED_RECIPES
from sagepatch.numerics.recipe import RECIPES
from sagepatch.variant import Toolchain

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "contributing.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())
TOP = "sagepatch|tests|docs|benchmarks"
PATHS = sorted(set(re.findall(rf"(?:`|python )((?:{TOP})/[\w./]+)`", TEXT)))
NAMES = sorted(set(re.findall(rf"`((?:{TOP})/[\w./]+)` \(`(\w+)`\)", TEXT)))


def test_the_page_is_read() -> None:
    assert len(PATHS) >= 30
    assert len(NAMES) >= 30


@pytest.mark.parametrize("path", PATHS)
def test_a_file_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), NAMES, ids=[f"{p}:{n}" for p, n in NAMES])
def test_a_name_of_the_page_is_defined_in_its_file(path: str, name: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^ *(?:def |class )?{name}\b *(?:[(:=\[]|$)", source, re.MULTILINE)


def test_every_toolchain_is_in_every_list_of_them() -> None:
    toolchains = set(get_args(Toolchain))
    assert {variant.toolchain for variant in CATALOGUE} == toolchains
    assert set(TOOLCHAINS) == toolchains
    assert set(CHECKED) == toolchains - {"sdpa", "emulated"}


@pytest.mark.parametrize("listed", [CANDIDATE_RECIPES, EMULATED_RECIPES, EMULATED_FEW, FIRST])
def test_lists_of_recipes_name_recipes_that_have_kernels(listed: tuple[str, ...]) -> None:
    served = {variant.recipe.name for variant in CATALOGUE}
    assert set(listed) <= served & set(RECIPES)
