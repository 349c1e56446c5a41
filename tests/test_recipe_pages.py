"""The pages of docs/recipes say what the recipes and the measurements say now."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_recipe_pages_are_current() -> None:
    wanted = runpy.run_path(str(ROOT / "benchmarks" / "recipe_pages.py"))["files"]()
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / "docs" / "recipes").glob("*.md")
    }
    assert found == wanted, "run: python benchmarks/recipe_pages.py"
