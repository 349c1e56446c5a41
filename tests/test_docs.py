"""Links of the README and of every page of the docs lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def links(page: Path) -> list[tuple[str, str]]:
    """(file, anchor) of each link that stays in the repository, either may be empty."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    inside = [link.partition("#") for link in found if not re.match(r"[a-z]+:", link)]
    return [(file, anchor) for file, _, anchor in inside]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages_and_links() -> None:
    assert len(PAGES) > 40
    assert sum(len(links(page)) for page in PAGES) > 150
    assert any(anchor for page in PAGES for _, anchor in links(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = page.parent / file if file else page
        assert target.exists(), file
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{file}#{anchor}"
