"""A calibration's table as JSON, and back: what an interrupted calibration goes on from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.sample import HeadErrors, Remedy, Sample, Statistics
from sagepatch.errors import PlanError

if TYPE_CHECKING:
    from sagepatch.calibration.table import Calibration

SCHEMA = 2
# Files of this one did not tell a candidate that a sample refused from one that it did not try.
WITHOUT_REFUSALS = 1


def rendered(calibration: Calibration) -> str:
    """JSON text. Infinite errors are null; what follows from other fields is left out. `kernels`
    are the numerics versions of all that was measured.
    """
    follow = ("worst", "cosine_mean", "estimated", "names", "completed", "stale")
    data = asdict(calibration, dict_factory=lambda of: {n: v for n, v in of if n not in follow})
    rows = (row for layer in calibration.layers for row in layer.rows)
    names = sorted({name for row in rows for name in row.errors})
    kernels = {name: BY_NAME[name].numerics_version for name in names if name in BY_NAME}
    kernels |= calibration.kernels
    data = {"schema": SCHEMA, **_finite(data), "kernels": kernels}
    return json.dumps(data, allow_nan=False) + "\n"


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
            "layers": [_layer(one, origin) for one in data["layers"]],
            # Older files do not tell.
            "kernels": {str(k): int(v) for k, v in data.get("kernels", {}).items()},
            "runs": tuple(map(str, data["runs"])),
            "run_seconds": _least(data["run_seconds"], "run_seconds", origin),
            "measuring_seconds": _least(data["measuring_seconds"], "measuring_seconds", origin),
            "preparing_seconds": _least(
                data.get("preparing_seconds", 0.0), "preparing_seconds", origin
            ),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{origin} is no whole table of measurements ({error!r})") from error


def _layer(
    data: Any, origin: str
) -> tuple[str, str, tuple[Sample, ...], tuple[Remedy, ...], dict[str, tuple[str, ...]], int]:
    where = f"{origin}, layer {data['site']}"
    rows = tuple(_sample(row, f"{where}, sample {n}") for n, row in enumerate(data["rows"], 1))
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


def _sample(data: Any, where: str) -> Sample:
    seen = data["statistics"]
    step, steps = _whole(data["step"]), _whole(data["steps"])
    if step is not None and steps is not None and not 0 <= step < steps:
        raise PlanError(f"{where}: step is {step} of {steps}, needs 0 to {steps - 1}")
    return Sample(
        call=int(data["call"]),
        step=step,
        steps=steps,
        shape=str(data["shape"]),
        dtype=str(data["dtype"]),
        errors={
            str(name): _errors(one, f"{where}, {name}") for name, one in data["errors"].items()
        },
        statistics=None
        if seen is None
        else Statistics(*(_numbers(seen[field.name]) for field in fields(Statistics))),
        us_exact=_time(data, "us_exact", where),
        run=str(data["run"]),
        skipped=tuple(map(str, data.get("skipped", ()))),
        refused=tuple(map(str, data.get("refused", ()))),
        host_us_exact=_time(data, "host_us_exact", where),
    )


def _errors(data: Any, where: str) -> HeadErrors:
    cosine = _numbers(data["cosine"])
    if not cosine:
        raise ValueError("errors of no head")
    # Past 1 by rounding at most.
    odd = next((one for one in cosine if not -1.001 <= one <= 1.001), None)
    if odd is not None:
        raise PlanError(f"{where}: cosine is {odd:g}, needs -1 to 1")
    far = {name: _numbers(data[name]) for name in ("rel_l1", "rmse", "norm_ratio")}
    for name, heads in far.items():
        if len(heads) != len(cosine):
            raise PlanError(f"{where}: {name} has {len(heads)} heads, cosine has {len(cosine)}")
        odd = next((one for one in heads if not one >= 0), None)
        if odd is not None:
            raise PlanError(f"{where}: {name} is {odd:g}, needs 0 or more")
    us, host_us = _time(data, "us", where), _time(data, "host_us", where)
    rel_l1, rmse, norm_ratio = far.values()
    finite = bool(data["finite"])
    return HeadErrors(finite, cosine, rel_l1, rmse, norm_ratio, us, host_us=host_us)


def _numbers(data: Any) -> tuple[float, ...]:
    return tuple(math.inf if one is None else float(one) for one in data)


def _time(data: Any, name: str, where: str) -> float | None:
    """A time in microseconds; older files lack those of the host."""
    value = data.get(name) if name.startswith("host_") else data[name]
    return None if value is None else _least(value, name, where)


def _least(value: Any, name: str, where: str) -> float:
    found = float(value)
    if not 0 <= found < math.inf:
        raise PlanError(f"{where}: {name} is {found:g}, needs a finite number of 0 or more")
    return found


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
