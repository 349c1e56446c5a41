"""Imports only downwards, and importing sagepatch costs torch and nothing heavier."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "sagepatch"
ORDER = (
    *(
        "errors",
        "bounded",
        "spec",
        "numerics",
        "variant",
        "env",
        "plan_values",
        "plan",
        "backends",
        "ledger",
        "dispatch",
    ),
    *(
        "schedule",
        "layer",
        "settling",
        "ops",
        "arguments",
        "known",
        "functional",
        "patchers",
        "calibration",
        "bench",
        "plan_cache",
        "report",
    ),
    *("patch", "api", "demo", "cli"),
)


def _own_imports(path: Path) -> set[str]:
    """The second part of every `sagepatch.x` that a file imports at its top level or inside a
    function.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "sagepatch":
                names = [f"sagepatch.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("sagepatch.")}
    return found


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_to_its_left(path: Path) -> None:
    here = ORDER.index(_layer(path))
    upwards = {name for name in _own_imports(path) if ORDER.index(name) > here}
    assert not upwards


def test_import_loads_nothing_heavy() -> None:
    heavy = ["diffusers", "transformers", "rich", "matplotlib", "triton", "jinja2", "typer"]
    code = f"import sagepatch, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_no_file_is_a_grab_bag() -> None:
    banned = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not [p for p in PACKAGE.rglob("*.py") if p.name in banned]
