"""Values of a plan's JSON objects: each of the type that its field declares, and in its range.
Knows no plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sagepatch.errors import PlanError

# Characters of one value in a sentence; a layer's path has some 60.
_MOST_SHOWN = 200
# Half of a character: JSON has it as an escape, no file and no page can hold it.
_HALF = re.compile("[\ud800-\udfff]")
# What numbers can be. Bounds may be overrun by rounding, in files of any age.
_ROUNDING = 1e-3
_ANY = (0.0, math.inf)
_BOUNDS = {
    **dict.fromkeys(("cosine", "cosine_mean"), (-1.0, 1.0)),
    **dict.fromkeys(("start", "end", "p_entropy"), (0.0, 1.0)),
    **dict.fromkeys(("rel_l1", "rmse", "norm_ratio", "max_abs_v", "k_offset", "q_outlier"), _ANY),
    **dict.fromkeys(("us_exact", "us_chosen"), _ANY),
    **dict.fromkeys(("numerics_version", "samples", "worst_head", "worst_call"), _ANY),
}


def typed(cls: type, data: Any, origin: str, skip: frozenset[str] | set[str] = frozenset()) -> Any:
    """The values of a JSON object, each of the type its field declares; nothing missing, nothing
    unknown.
    """
    if not isinstance(data, dict):
        raise PlanError(f"{origin} holds {type(data).__name__} where an object is needed")
    declared = {field.name: str(field.type) for field in fields(cls) if field.name not in skip}
    unknown = sorted(set(data) - set(declared) - skip)
    if unknown:
        raise PlanError(f"{origin} has unknown fields: {first(unknown)}")
    missing = sorted(set(declared) - set(data))
    if missing:
        raise PlanError(f"{origin} lacks the fields {', '.join(missing)}")
    for name, kind in declared.items():
        if not is_of(data[name], kind):
            odd = isinstance(data[name], float) and kind.startswith("float")
            needed = "a finite number" if odd else kind
            needed = "a list of strings" if kind.startswith("tuple") else needed
            needed += " that UTF-8 can hold" if _holds_halves(data[name]) else ""
            raise PlanError(f"{origin}: {name} is {quoted(data[name])}, needs {needed}")
        _check_bounds(name, data[name], origin)
    return {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}


def _check_bounds(name: str, value: Any, origin: str) -> None:
    """Refuse a number that what its field describes cannot be, and versions below 0."""
    if isinstance(value, dict):
        odd = next((key for key, one in value.items() if isinstance(one, int) and one < 0), None)
        if odd is not None:
            raise PlanError(
                f"{origin}: {name} has {quoted(value[odd])} for {first([odd])}, needs 0 or more"
            )
    if value is None or name not in _BOUNDS:
        return
    least, most = _BOUNDS[name]
    slack = 0.0 if math.isinf(most) else _ROUNDING
    if not least - slack <= value <= most + slack:
        needed = f"{least:g} or more" if math.isinf(most) else f"{least:g} to {most:g}"
        raise PlanError(f"{origin}: {name} is {quoted(value)}, needs {needed}")


def quoted(value: object) -> str:
    """A value from a file in an error's sentence: as Python writes it, as far as it can be read."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def first(names: Sequence[str]) -> str:
    """The first three of some names from a file."""
    shown = (name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}..." for name in names[:3])
    return ", ".join(shown) + (" ..." if len(names) > 3 else "")


def is_of(value: Any, kind: str) -> bool:
    """Whether a value of JSON is of the type that a field declares; numbers must be finite."""
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return kind == "bool"
    if isinstance(value, list):
        return kind.startswith("tuple") and all(is_of(item, "str") for item in value)
    if isinstance(value, dict):
        items = kind.removeprefix("dict[str, ").removesuffix("]")
        whole = all(is_of(key, "str") for key in value)
        return kind.startswith("dict") and whole and all(is_of(v, items) for v in value.values())
    if kind.startswith("float"):
        # A whole number may be too large for a float, which it would become somewhere.
        wide = isinstance(value, int) and abs(value) >= 1 << 63
        return isinstance(value, int | float) and not wide and math.isfinite(value)
    if kind.startswith("int"):
        return isinstance(value, int) and abs(value) < 1 << 63
    return kind.startswith("str") and isinstance(value, str) and not _HALF.search(value)


def _holds_halves(value: Any) -> bool:
    items = [*value, *value.values()] if isinstance(value, dict) else value
    texts = [value] if isinstance(value, str) else items if isinstance(items, list) else []
    return any(isinstance(text, str) and _HALF.search(text) for text in texts)
