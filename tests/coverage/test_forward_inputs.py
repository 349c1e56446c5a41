"""`inspect` counts a forward as the coverage pages do, at published geometry, on shapes alone."""

from __future__ import annotations

import pytest
import torch
from diffusers_families import FAMILIES
from diffusers_shares import kept_table

from sagepatch.cli.forward_count import Asked, count
from sagepatch.cli.forward_inputs import FORWARDS
from sagepatch.patchers.model import Parts, search

# What the page is counted at, where that is not the pipeline's own usual size.
PAGE = {
    "Wan 2.1 / 2.2, text to video": Asked(720, 1280, 81),
    "CogVideoX 5B, 1.5": Asked(768, 1360, 81),
    "SD 1.x / 2.x": Asked(512, 512),
    "SDXL": Asked(1024, 1024),
}
KNOWN = [family for family in FAMILIES if family.model in FORWARDS and family.full is not None]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=() if family.name in ("SD 1.x / 2.x", "LTX-Video") else pytest.mark.slow,
        )
        for family in KNOWN
        if "image to video" not in family.name
    ],
    ids=str,
)
def test_it_counts_what_the_page_says(family) -> None:
    with torch.device("meta"):
        model = family.built(full=True).to("meta")
    sites = search(Parts(family.model, {"": model})).sites
    (found,) = count({"": model}, sites, PAGE.get(family.name, Asked()))
    page = kept_table()[family.name]
    assert found.cost is not None, found.why_not
    assert f"{100 * found.cost.share():.0f}" == page.attention_percent
    assert f"{found.cost.total / 1e12:.1f}" == page.tera_operations
    # Every call is some layer's.
    assert set(found.shapes) == {site.name for site in sites}


def test_every_class_is_tried() -> None:
    assert {family.model for family in KNOWN} == set(FORWARDS)
