"""The report as JSON (schema in docs/report.md), and back."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sagepatch.errors import ModelError
from sagepatch.patchers.site import Left
from sagepatch.report.model import LayerRow, Report

SCHEMA = 1


def render(report: Report) -> str:
    """JSON text; what was not measured is null, never NaN."""
    pictures = report.pictures
    data = {
        "schema": SCHEMA,
        "model": report.model,
        "headline": report.headline(),
        "threshold": report.threshold,
        "emulated": report.emulated,
        "warnings": list(report.warnings),
        "pictures": None if pictures is None else pictures.scores(),
        "layers": [asdict(row) for row in report.layers],
        "left": [asdict(layer) for layer in report.left],
        "machine": report.machine,
    }
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report that `render` wrote; its pictures are not in it. Raises `ModelError`."""
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read the report {name}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{name} is not a JSON report: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ModelError(f"{name} has report schema {found!r}, this version reads {SCHEMA}")
    known = {field.name for field in fields(LayerRow)}
    try:
        rows = []
        for row in data["layers"]:
            values = {key: value for key, value in row.items() if key in known}
            rows.append(LayerRow(**{**values, "notes": tuple(values["notes"])}))
        return Report(
            data["model"],
            tuple(rows),
            tuple(Left(**layer) for layer in data["left"]),
            data["machine"],
            data["threshold"],
            data["emulated"],
            tuple(data["warnings"]),
        )
    except (KeyError, TypeError) as error:
        raise ModelError(f"{name} is not a whole report: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
