"""A plan: which kernel each layer of one model runs, with the measurements behind it; small strict
JSON.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sagepatch.errors import MachineError, PlanError
from sagepatch.numerics.recipe import RECIPES

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """What one layer runs and why. Measurements are the worst over samples and heads, None if none
    were made.
    """

    site: str
    kind: str
    variant: str  # full name, "sdpa.exact" for exact attention
    numerics_version: int
    reason: str
    samples: int = 0
    shape: str | None = None
    dtype: str | None = None
    cosine: float | None = None
    rel_l1: float | None = None
    rmse: float | None = None
    norm_ratio: float | None = None
    worst_head: int | None = None
    us_exact: float | None = None
    us_chosen: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one model. `fingerprint` is the model's structure; `gpu` is where timings were made
    ("CPU": nowhere).

    >>> plan.save("plan.json"); Plan.load("plan.json") == plan
    True
    """

    fingerprint: str
    model: str
    threshold: float
    emulated: bool
    gpu: str
    versions: dict[str, str | None]
    entries: tuple[PlanEntry, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan in one step; raises `MachineError` where that cannot be done."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; raises `PlanError` for anything but a plan that this version understands."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)}: {error.strerror}") from error
        return cls.from_json(text, os.fspath(path))

    @classmethod
    def from_json(cls, text: str, origin: str = "plan") -> Plan:
        """Parse JSON text; `origin` names it in errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{origin} is not JSON ({error}): make it again with calibrate"
            ) from error
        if not isinstance(data, dict):
            raise PlanError(f"{origin} holds {type(data).__name__}, needs a JSON object")
        schema = data.get("schema")
        if schema != SCHEMA:
            raise PlanError(
                f"{origin} has schema {schema!r}, this version reads {SCHEMA}: "
                "make the plan again, or use the sagepatch that wrote it"
            )
        entries = data.pop("entries", None)
        if not isinstance(entries, list):
            raise PlanError(f"{origin} has no list of entries")
        values = _typed(cls, data, origin, skip={"entries"})
        rows = tuple(PlanEntry(**_typed(PlanEntry, entry, origin)) for entry in entries)
        for row in rows:
            if row.variant.rpartition(".")[2] not in RECIPES:
                raise PlanError(f"{origin} names variant {row.variant!r}, which does not exist")
        names = [row.site for row in rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PlanError(f"{origin} names a layer twice: {', '.join(twice)}")
        return cls(entries=rows, **values)

    def check(self, fingerprint: str, sites: Iterable[str]) -> None:
        """Raise `PlanError` unless this plan is for a model of that structure and those layers."""
        unknown = sorted({entry.site for entry in self.entries} - set(sites))
        if unknown:
            shown = ", ".join(unknown[:3]) + (" ..." if len(unknown) > 3 else "")
            raise PlanError(
                f"the plan for {self.model} names {len(unknown)} layers "
                f"that this model has not: {shown}"
            )
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model ({self.model}, structure {self.fingerprint}; "
                f"this one is {fingerprint}): calibrate again"
            )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all; raises `MachineError` with one sentence."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all; raises `MachineError` with one sentence."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MachineError(f"cannot write {target}: {error.strerror or error}") from error


def _typed(cls: type, data: Any, origin: str, skip: frozenset[str] | set[str] = frozenset()) -> Any:
    """The values of a JSON object, each of the type its field declares; nothing missing, nothing
    unknown.
    """
    if not isinstance(data, dict):
        raise PlanError(f"{origin} holds {type(data).__name__} where an object is needed")
    declared = {field.name: str(field.type) for field in fields(cls) if field.name not in skip}
    unknown = sorted(set(data) - set(declared))
    if unknown:
        raise PlanError(f"{origin} has unknown fields: {', '.join(unknown)}")
    missing = sorted(set(declared) - set(data))
    if missing:
        raise PlanError(f"{origin} lacks the fields {', '.join(missing)}")
    for name, kind in declared.items():
        if not _is(data[name], kind):
            raise PlanError(f"{origin}: {name} is {data[name]!r}, needs {kind}")
    return data


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return kind == "bool"
    if isinstance(value, dict):
        return kind.startswith("dict") and all(
            isinstance(key, str) and (item is None or isinstance(item, str))
            for key, item in value.items()
        )
    if kind.startswith("float"):
        return isinstance(value, int | float) and math.isfinite(value)
    if kind.startswith("int"):
        return isinstance(value, int)
    return kind.startswith("str") and isinstance(value, str)
