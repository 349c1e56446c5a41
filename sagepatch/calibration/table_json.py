"""A calibration's table as JSON, and back: what an interrupted calibration goes on from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from sagepatch.calibration.sample import HeadErrors, Remedy, Sample, Statistics
from sagepatch.errors import PlanError

if TYPE_CHECKING:
    from sagepatch.calibration.table import Calibration

SCHEMA = 2
# Files of this one did not tell a candidate that a sample refused from one that it did not try.
WITHOUT_REFUSALS = 1


def rendered(calibration: Calibration) -> str:
    """JSON text. Infinite errors are null; what follows from other fields is left out."""
    follow = ("worst", "cosine_mean", "estimated", "names", "filled")
    data = asdict(calibration, dict_factory=lambda of: {n: v for n, v in of if n not in follow})
    return json.dumps({"schema": SCHEMA, **_finite(data)}, allow_nan=False) + "\n"


def parsed(text: str, origin: str) -> dict[str, Any]:
    """The fields of a calibration, its layers as (site, kind, rows, remedies, runs, spoilt);
    `origin` names the text in errors. In files of schema 1 a candidate that a sample lacks, though
    others of its layer have it and there was time, counts as refused.

    Raises `PlanError` for anything but a table that this version or an earlier one wrote.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{origin} is not JSON ({error}): calibrate anew") from error
    if not isinstance(data, dict) or data.get("schema") not in (WITHOUT_REFUSALS, SCHEMA):
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise PlanError(
            f"{origin} is no table of measurements that this version reads "
            f"(schema {found!r}, needs {SCHEMA}): calibrate anew"
        )
    try:
        return {
            "fingerprint": str(data["fingerprint"]),
            "model": str(data["model"]),
            "emulated": bool(data["emulated"]),
            "gpu": str(data["gpu"]),
            "versions": {
                str(k): None if v is None else str(v) for k, v in data["versions"].items()
            },
            "layers": [_layer(one) for one in data["layers"]],
            "runs": tuple(map(str, data["runs"])),
            "run_seconds": float(data["run_seconds"]),
            "measuring_seconds": float(data["measuring_seconds"]),
            "preparing_seconds": float(data.get("preparing_seconds", 0.0)),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{origin} is no whole table of measurements ({error!r})") from error


def _layer(
    data: Any,
) -> tuple[str, str, tuple[Sample, ...], tuple[Remedy, ...], dict[str, tuple[str, ...]], int]:
    rows = tuple(map(_sample, data["rows"]))
    if any("refused" not in row for row in data["rows"]):
        names = dict.fromkeys(name for row in rows for name in row.errors)
        rows = tuple(
            replace(row, refused=tuple(n for n in names if n not in {*row.errors, *row.skipped}))
            for row in rows
        )
    runs = {str(name): tuple(map(str, those)) for name, those in data.get("runs", {}).items()}
    remedies = tuple(
        Remedy(**{field.name: one[field.name] for field in fields(Remedy)})
        for one in data["remedies"]
    )
    return str(data["site"]), str(data["kind"]), rows, remedies, runs, int(data.get("spoilt", 0))


def _sample(data: Any) -> Sample:
    seen = data["statistics"]
    return Sample(
        call=int(data["call"]),
        step=_whole(data["step"]),
        steps=_whole(data["steps"]),
        shape=str(data["shape"]),
        dtype=str(data["dtype"]),
        errors={str(name): _errors(one) for name, one in data["errors"].items()},
        statistics=None
        if seen is None
        else Statistics(*(_numbers(seen[field.name]) for field in fields(Statistics))),
        us_exact=_number(data["us_exact"]),
        run=str(data["run"]),
        skipped=tuple(map(str, data.get("skipped", ()))),
        refused=tuple(map(str, data.get("refused", ()))),
        host_us_exact=_number(data.get("host_us_exact")),
    )


def _errors(data: Any) -> HeadErrors:
    cosine = _numbers(data["cosine"])
    if not cosine:
        raise ValueError("errors of no head")
    return HeadErrors(
        bool(data["finite"]),
        cosine,
        _numbers(data["rel_l1"]),
        _numbers(data["rmse"]),
        _numbers(data["norm_ratio"]),
        _number(data["us"]),
        host_us=_number(data.get("host_us")),
    )


def _numbers(data: Any) -> tuple[float, ...]:
    return tuple(math.inf if one is None else float(one) for one in data)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
