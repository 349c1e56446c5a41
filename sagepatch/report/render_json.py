"""The report as JSON (schema in docs/report.md), and back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration import table_json
from sagepatch.calibration.table import Calibration, LayerTable
from sagepatch.errors import InvalidArgument, ModelError, PlanError
from sagepatch.numerics.recipe import TIERS
from sagepatch.patchers.site import Left
from sagepatch.plan import PlanRange
from sagepatch.plan_values import first, quoted
from sagepatch.report.model import LayerRow, Report
from sagepatch.report.pictures import Comparison
from sagepatch.report.printable import finite_deep, printable, printable_deep

SCHEMA = 2
# The fields of a report that stand at the top of its JSON, with their types.
_TOP = {
    "model": "str",
    "threshold": "float",
    "emulated": "bool",
    "in_force": "bool",
    "warnings": "tuple[str, ...]",
    "run_seconds": "float | None",
    "exact_run_seconds": "float | None",
}
_SCORES = {"psnr_db": "float | None", "ssim": "float", "frames": "int", "worst_frame": "int"}


def render(report: Report) -> str:
    """JSON text; what was not measured is null, never NaN."""
    pictures, attention = report.pictures, report.attention()
    data = {
        "schema": SCHEMA,
        "model": report.model,
        "headline": report.headline(),
        "in_force": report.in_force,
        "counts": asdict(report.counts),
        "threshold": report.threshold,
        "emulated": report.emulated,
        "warnings": list(report.warnings),
        "run_seconds": report.run_seconds,
        "exact_run_seconds": report.exact_run_seconds,
        "attention": None
        if attention is None
        else {
            "layers": attention.layers,
            "calls": attention.calls,
            "us_exact": attention.us_exact,
            "us_chosen": attention.us_chosen,
            "gain": attention.gain,
            "share": attention.share,
            "run_gain": attention.run_gain,
            "measured_run_gain": attention.measured_run_gain,
        },
        "pictures": None if pictures is None else pictures.scores(),
        "layers": [asdict(row) for row in report.layers],
        "left": [asdict(layer) for layer in report.left],
        "machine": report.machine,
        "calibration": None
        if report.calibration is None
        else json.loads(table_json.rendered(report.calibration)),
    }
    return json.dumps(finite_deep(data), indent=1, allow_nan=False) + "\n"


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report that `render` wrote; of its pictures only the scores are in it. Fields it does
    not know are skipped, and so is a table of kernels it does not know, with a warning. Raises
    `ModelError` for anything but a report.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=lambda _: None, parse_int=_whole)
    except OSError as error:
        raise ModelError(f"cannot read the report {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no text, a path with a zero byte
        raise ModelError(f"{name} is not a JSON report: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if isinstance(schema, bool) or schema not in (1, SCHEMA):
        raise ModelError(
            f"{name} has report schema {quoted(schema)}, this version reads 1 to {SCHEMA}"
        )
    try:
        known = _from_1(data) if schema == 1 else data
        return _measured(
            _report(printable_deep(finite_deep(known))), known.get("calibration"), name
        )
    except (_Unfit, RecursionError, PlanError, InvalidArgument) as unfit:
        raise ModelError(f"{name} is not a whole report: {unfit}") from unfit


def _whole(digits: str) -> int:
    """A whole number that a float can hold too."""
    if len(digits) > 19:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


class _Unfit(Exception):
    """What is missing or of another type."""


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 knew no schedule, no statistics of the inputs and no exact run beside."""
    added: dict[str, Any] = {
        "worst_step": None,
        "ranges": [],
        "k_offset": None,
        "q_outlier": None,
        "p_entropy": None,
        "remedy": None,
    }
    rows = data.get("layers")
    if isinstance(rows, list):
        rows = [{**row, **added} if isinstance(row, dict) else row for row in rows]
    return {**data, "exact_run_seconds": None, "calibration": None, "layers": rows}


def _report(data: dict[str, Any]) -> Report:
    # Reports made before it was told are of patches in force.
    data = {"in_force": True, **data}
    layers = [_layer(row) for row in _rows(data, "layers")]
    left = [_typed(row, _declared(Left), "a layer left alone") for row in _rows(data, "left")]
    if not isinstance(data.get("machine"), dict):
        raise _Unfit("machine is no object")
    return Report(
        layers=tuple(layers),
        left=tuple(Left(**row) for row in left),
        machine=data["machine"],
        pictures=_pictures(data.get("pictures")),
        **_typed(data, _TOP, "the report"),
    )


def _measured(report: Report, data: Any, name: str) -> Report:
    """The report with its table of measurements, where that is one of kernels known here."""
    if data is None:
        return report
    values = table_json.parsed(json.dumps(data), name)
    layers = tuple(LayerTable(*layer) for layer in values.pop("layers"))
    unknown = sorted({one for layer in layers for one in layer.names} - set(BY_NAME))
    if unknown:
        said = f"its measurements are left out: no kernel is called {first(unknown)} here"
        return replace(report, warnings=(*report.warnings, printable(said)))
    return report.with_calibration(Calibration(layers=layers, **values))


def _layer(data: Any) -> LayerRow:
    declared = _declared(LayerRow)
    del declared["ranges"]
    row = _typed(data, declared, "a layer")
    if row["tier"] not in TIERS:
        raise _Unfit(f"tier is {quoted(row['tier'])}, needs {', '.join(TIERS)}")
    ranges = [_typed(part, _declared(PlanRange), "a range") for part in _rows(data, "ranges")]
    return LayerRow(ranges=tuple(PlanRange(**part) for part in ranges), **row)


def _pictures(data: Any) -> Comparison | None:
    if data is None:
        return None
    scores = _typed(data, _SCORES, "pictures")
    psnr_db = math.inf if scores["psnr_db"] is None else scores["psnr_db"]
    return Comparison((), (), psnr_db, scores["ssim"], scores["worst_frame"], scores["frames"])


def _rows(data: dict[str, Any], key: str) -> list[Any]:
    rows = data.get(key)
    if not isinstance(rows, list):
        raise _Unfit(f"{key} is no list")
    return rows


def _declared(cls: type) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields(cls)}


def _typed(value: Any, declared: dict[str, str], where: str) -> dict[str, Any]:
    """The declared fields of a JSON object, each checked; others are skipped."""
    if not isinstance(value, dict):
        raise _Unfit(f"{where} is {type(value).__name__}, needs an object")
    missing = sorted(set(declared) - set(value))
    if missing:
        raise _Unfit(f"{where} lacks {', '.join(missing)}")
    for name, kind in declared.items():
        if not _is(value[name], kind):
            raise _Unfit(f"{name} of {where} is {quoted(value[name])}, needs {kind}")
    return {
        name: tuple(value[name]) if kind.startswith("tuple") else value[name]
        for name, kind in declared.items()
    }


def _is(value: Any, kind: str) -> bool:
    base, _, optional = kind.partition(" | ")
    if value is None:
        return bool(optional)
    if base == "tuple[str, ...]":
        return isinstance(value, list) and _all(value, str)
    if base == "dict[str, int]":
        return isinstance(value, dict) and _all(value.values(), int)
    if base == "float":
        return _all([value], (int, float))
    return _all([value], {"str": str, "int": int, "bool": bool}.get(base, str))


def _all(values: Iterable[object], kind: type | tuple[type, ...]) -> bool:
    """Whether all are of that type; a bool counts as one alone."""
    return all(
        isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        for value in values
    )
