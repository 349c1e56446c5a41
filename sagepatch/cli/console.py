"""Where the command line prints: results to stdout, progress and remarks to stderr."""

from __future__ import annotations

import sys
from functools import cache

from rich.console import Console


@cache
def out() -> Console:
    """Console for results; wide enough for a table where there is no terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140)


@cache
def err() -> Console:
    """Console for progress, hints and errors."""
    return Console(file=sys.stderr, stderr=True)


def hint(text: str) -> None:
    """A remark that is no result."""
    err().print(text, style="yellow", highlight=False, markup=False)
