"""Values that any terminal, page or file can take: text that would act instead of being shown is
escaped, numbers that JSON does not have are none. Knows no reports.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Any

# Control characters, invisible ones that reorder a line, lone surrogates, line and paragraph
# separators.
_ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str) -> str:
    r"""The text with acting characters as escapes.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if _acts(char) else char for char in text)


def printable_deep(value: Any) -> Any:
    """A JSON value with every string in it made printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_deep(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(printable_deep(item) for item in value)
    return value


def finite_deep(value: Any) -> Any:
    """A JSON value with None for every number in it that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite_deep(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_deep(item) for item in value]
    return value


def _acts(char: str) -> bool:
    return unicodedata.category(char) in _ACTING


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
