"""Puts tests/ on the path, so that tests share the builders in tests/models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
