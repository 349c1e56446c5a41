"""Run against an installed wheel, outside the checkout: every file of the package came along."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import sagepatch

root = Path(str(files("sagepatch")))
checkout = Path(__file__).resolve().parent.parent
if root.is_relative_to(checkout / "sagepatch"):
    sys.exit(f"sagepatch was imported from the checkout ({root}), not from the wheel")
wanted = {
    path.relative_to(checkout / "sagepatch")
    for path in (checkout / "sagepatch").rglob("*")
    if path.is_file() and path.suffix != ".pyc"
}
missing = sorted(str(path) for path in wanted if not (root / path).exists())
if missing:
    sys.exit(f"the wheel lacks {len(missing)} files: {', '.join(missing[:10])}")
print(f"sagepatch {sagepatch.__version__}: {len(wanted)} files in the wheel at {root}")
