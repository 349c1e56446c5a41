"""docs/coverage-diffusers.md says what the code finds and counts today."""

from __future__ import annotations

import pytest
from diffusers_families import FAMILIES
from diffusers_family import Family
from diffusers_page import PAGE, page
from diffusers_shares import kept_table, published

PUBLISHED = [family for family in FAMILIES if family.full is not None]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run tests/coverage/diffusers_page.py"


def test_every_published_geometry_is_in_the_table() -> None:
    assert list(kept_table()) == [family.name for family in PUBLISHED]


@pytest.mark.slow
@pytest.mark.parametrize("family", PUBLISHED, ids=str)
def test_table_is_what_counting_finds(family: Family) -> None:
    assert published(family) == kept_table()[family.name]


def test_share_of_one_block_is_that_of_its_shapes() -> None:
    """FLUX.1 by hand: 57 calls over 4608 tokens and 24 heads of 128."""
    counted = kept_table()["FLUX.1"]
    attention = 57 * 4 * 4608**2 * 24 * 128
    total = float(counted.tera_operations) * 1e12
    assert counted.attention_percent == f"{100 * attention / total:.0f}"
