"""Text of generated pages: paragraphs and lists filled to the docs' width, tables from rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def filled(text: str) -> str:
    """Markdown with its paragraphs and list items filled; headings, tables and pictures stay."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.strip().splitlines()
        items: list[str] = []
        for line in lines:
            kept = line.startswith(("|", "#", "!", "```"))
            if kept or line.startswith("- ") or not items or items[-1].startswith(("|", "#")):
                items.append(line)
            else:
                items[-1] += " " + line.strip()
        blocks.append("\n".join(map(_fill, items)))
    return "\n\n".join(blocks)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def _fill(line: str) -> str:
    if line.startswith(("|", "#", "!")):
        return line
    return textwrap.fill(
        line,
        WIDTH,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
