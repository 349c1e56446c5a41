"""A plan: which kernel each layer of one model runs, with the measurements behind it; small strict
JSON.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sagepatch.errors import InvalidArgument, MachineError, PlanError
from sagepatch.numerics.recipe import RECIPES
from sagepatch.plan_values import first, is_of, quoted, typed
from sagepatch.spec import AttnSpec

SCHEMA = 3
# The least cosine of a layer, in its worst head and sample, where nobody says otherwise.
DEFAULT_THRESHOLD = 0.998
# What a layer attends to: its own sequence, another one, both in one.
KINDS = ("self", "cross", "joint")


@dataclass(frozen=True, slots=True)
class PlanRange:
    """What one layer runs in one part of the denoising schedule, and why. Places are fractions: 0
    is the first step, 1 the last; a range holds its start, and its end only where that is 1.

    Errors are the worst over the samples in the range, None if there were none. `alternatives` are
    the other kernels that are accurate enough in it, best first.
    """

    start: float
    end: float
    variant: str
    numerics_version: int
    reason: str
    cosine: float | None = None
    rel_l1: float | None = None
    worst_head: int | None = None
    worst_call: int | None = None
    us_chosen: float | None = None
    alternatives: dict[str, int] = field(default_factory=dict)

    def holds(self, at: float) -> bool:
        """Whether this range holds a place of the schedule."""
        return self.start <= at < self.end or at == self.end == 1


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """What one layer runs and why. Errors are the worst over samples and heads, None if none were
    measured.

    `ranges` says what runs where in the schedule, in order, from 0 to 1; empty: `variant` runs
    everywhere. With ranges `variant` is the most accurate of those that are accurate enough in
    all: it runs where the place in the schedule is unknown. `shapes` describes the measured calls.
    `worst_call` is the number of the call with the lowest cosine, `cosine_mean` the mean over
    samples. `alternatives` are the other kernels that are accurate enough, best first, with
    their numerics version: another GPU times them again. `k_offset`, `q_outlier` and
    `p_entropy` describe the inputs, each at the worst sample and head
    (`calibration.sample.Statistics`); `remedy` says what was tried where fast kernels were not
    accurate enough.
    """

    site: str
    kind: str
    variant: str  # full name, "sdpa.exact" for exact attention
    numerics_version: int
    reason: str
    samples: int = 0
    shapes: tuple[str, ...] = ()
    dtype: str | None = None
    cosine: float | None = None
    cosine_mean: float | None = None
    rel_l1: float | None = None
    rmse: float | None = None
    norm_ratio: float | None = None
    worst_head: int | None = None
    worst_call: int | None = None
    max_abs_v: float | None = None
    us_exact: float | None = None
    us_chosen: float | None = None
    alternatives: dict[str, int] = field(default_factory=dict)
    ranges: tuple[PlanRange, ...] = ()
    k_offset: float | None = None
    q_outlier: float | None = None
    p_entropy: float | None = None
    remedy: str | None = None

    @property
    def variants(self) -> tuple[str, ...]:
        """Every kernel that this entry may run, each once."""
        return tuple(dict.fromkeys((self.variant, *(part.variant for part in self.ranges))))

    @property
    def named(self) -> tuple[str, ...]:
        """Every kernel that this entry names, alternatives too."""
        others = [*self.alternatives, *(name for part in self.ranges for name in part.alternatives)]
        return tuple(dict.fromkeys((*self.variants, *others)))

    def range_at(self, at: float) -> PlanRange | None:
        """The range that holds a place of the schedule; None for an entry without ranges.

        >>> entry.range_at(0.0).variant
        'sdpa.exact'
        """
        return next((part for part in self.ranges if part.holds(at)), None)

    @property
    def shape(self) -> str | None:
        """The call that was measured first, None where none was."""
        return self.shapes[0] if self.shapes else None

    def measured_like(self, spec: AttnSpec, factor: float = 1.0) -> bool:
        """Whether this entry was measured on calls like `spec`, with lengths within `factor`; True
        where none was measured.
        """
        return not self.shapes or any(alike(shape, spec, factor) for shape in self.shapes)


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

    def __post_init__(self) -> None:
        if not is_of(self.threshold, "float"):
            raise InvalidArgument(f"threshold is {self.threshold!r}, needs a number")

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan in one step; raises `MachineError` where that cannot be done."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; raises `PlanError` for anything but a plan that this version understands."""
        return cls.from_json(read_text(path), os.fspath(path))

    @classmethod
    def from_json(cls, text: str, origin: str = "plan") -> Plan:
        """Parse JSON text; `origin` names it in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
            raise PlanError(
                f"{origin} is not JSON ({error}): make it again with calibrate"
            ) from error
        if not isinstance(data, dict):
            raise PlanError(f"{origin} holds {type(data).__name__}, needs a JSON object")
        data = _upgraded(data, origin)
        entries = data.pop("entries", None)
        if not isinstance(entries, list):
            raise PlanError(f"{origin} has no list of entries")
        values = typed(cls, data, origin, skip={"entries"})
        rows = tuple(_entry(entry, _told(entry, origin, n)) for n, entry in enumerate(entries, 1))
        for name in (name for row in rows for name in row.named):
            toolchain, _, recipe = name.rpartition(".")
            if not toolchain or recipe not in RECIPES:
                raise PlanError(f"{origin} names variant {quoted(name)}, which does not exist")
        counts = Counter(row.site for row in rows)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise PlanError(f"{origin} names a layer twice: {first(twice)}")
        return cls(entries=rows, **values)

    def check(self, fingerprint: str, sites: Iterable[str]) -> None:
        """Raise `PlanError` unless this plan is for a model of that structure and those layers."""
        unknown = sorted({entry.site for entry in self.entries} - set(sites))
        if unknown:
            raise PlanError(
                f"the plan for {first([self.model])} names {len(unknown)} layers "
                f"that this model has not: {first(unknown)}"
            )
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model ({first([self.model])}, "
                f"structure {first([self.fingerprint])}; "
                f"this one is {fingerprint}): calibrate again"
            )


_CALL = re.compile(r"(?P<batch>\d+)x(?P<heads>[\d/]+)x(?P<q>\d+)x(?P<kv>\d+)x(?P<rest>[\d/]+ .+)")
_OFFSET = re.compile(r"(causal) [+-]\d+")


def alike(shape: str, spec: AttnSpec, factor: float) -> bool:
    """Whether a call as described by `str(AttnSpec)` is like `spec`: the same heads, sizes, dtype
    and options, lengths within `factor`, any batch and causal offset.
    """
    measured, now = _CALL.fullmatch(shape), _CALL.fullmatch(str(spec))
    if measured is None or now is None:
        return shape == str(spec)
    same = measured["heads"] == now["heads"] and _OFFSET.sub(
        r"\1", measured["rest"]
    ) == _OFFSET.sub(r"\1", now["rest"])
    lengths = [sorted((int(measured[axis]), int(now[axis]))) for axis in ("q", "kv")]
    return same and all(longer <= factor * shorter for shorter, longer in lengths)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan's or a table's file; raises `PlanError` with one sentence."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read the plan {os.fspath(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{os.fspath(path)} is no text, so no plan: {error.reason}") from error
    except ValueError as error:  # a path that no system can have
        raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all; raises `MachineError` with one sentence."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all; raises `MachineError` with one sentence. A device or a pipe
    (/dev/stdout) is written to, not replaced, and so is what a symbolic link points to. A new file
    has the permissions that the process gives its files, an old one keeps its own.
    """
    given = Path(path)
    try:
        if given.exists() and (not given.is_file() or _is_open(given)):
            with given.open("wb") as file:
                file.write(data)
            return
        target = Path(os.path.realpath(given))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")

        def opener(name: str, flags: int) -> int:
            return os.open(name, flags, 0o666 if mode is None else mode)

        try:
            with open(temporary, "xb", opener=opener) as file:
                file.write(data)
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MachineError(f"cannot write {given}: {error.strerror or error}") from error
    except ValueError as error:  # a path that no system can have
        raise MachineError(f"cannot write {os.fspath(path)!r}: {error}") from error


def _is_open(path: Path) -> bool:
    """Whether a path names a file that a process has open, such as /dev/stdout."""
    folder = str(path.absolute().parent)
    return folder in ("/dev", "/dev/fd") or folder.startswith("/proc/")


def _upgraded(data: dict[str, Any], origin: str) -> dict[str, Any]:
    """The same plan in the present schema; refuses schemas that this version does not know."""
    schema = data.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise PlanError(f"{origin} has schema {quoted(schema)}, needs a number from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise PlanError(
            f"{origin} has schema {quoted(schema)}, this version reads up to {SCHEMA}: "
            "upgrade sagepatch, or make the plan again"
        )
    while data["schema"] < SCHEMA:
        data = _UPGRADES[data["schema"]](data)
    return data


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 kept one shape a layer and neither alternatives nor what decided."""
    added: dict[str, Any] = {
        "cosine_mean": None,
        "worst_call": None,
        "max_abs_v": None,
        "alternatives": {},
    }

    def entry(old: Any) -> Any:
        if not isinstance(old, dict) or "shape" not in old:
            return old
        shape = old["shape"]
        kept = {name: value for name, value in old.items() if name != "shape"}
        return {**kept, **added, "shapes": [] if shape is None else [shape]}

    entries = data.get("entries")
    rows = [entry(old) for old in entries] if isinstance(entries, list) else entries
    return {**data, "schema": 2, "entries": rows}


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """Schema 2 kept one kernel a layer for the whole schedule, and no statistics of the inputs."""
    added: dict[str, Any] = {
        "ranges": [],
        "k_offset": None,
        "q_outlier": None,
        "p_entropy": None,
        "remedy": None,
    }
    entries = data.get("entries")
    if isinstance(entries, list):
        entries = [{**old, **added} if isinstance(old, dict) else old for old in entries]
    return {**data, "schema": 3, "entries": entries}


_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}


def _told(data: Any, origin: str, number: int) -> str:
    """Where a sentence about one entry has to send its reader."""
    site = data.get("site") if isinstance(data, dict) else None
    return f"{origin}, entry {number}" + (f" ({first([site])})" if isinstance(site, str) else "")


def _entry(data: Any, origin: str) -> PlanEntry:
    """One entry of a plan; its ranges must follow one another from 0 to 1."""
    given = isinstance(data, dict) and "ranges" in data
    values = typed(PlanEntry, data, origin, skip={"ranges"} if given else frozenset())
    if values["kind"] not in KINDS:
        raise PlanError(f"{origin}: kind is {quoted(values['kind'])}, needs {', '.join(KINDS)}")
    listed = data["ranges"]
    if not isinstance(listed, list):
        raise PlanError(f"{origin}: ranges is {quoted(listed)}, needs a list")
    ranges = tuple(
        PlanRange(**typed(PlanRange, part, f"{origin}, range {number}"))
        for number, part in enumerate(listed, 1)
    )
    ends = [0.0, *(part.end for part in ranges)]
    starts = [*(part.start for part in ranges), 1.0]
    rising = all(part.start < part.end for part in ranges)
    if ranges and (starts != ends or not rising):
        parts = first([f"{part.start:g} to {part.end:g}" for part in ranges])
        raise PlanError(
            f"{origin}: the ranges of {first([values['site']])} are {parts}; "
            "they must follow one another from 0 to 1"
        )
    return PlanEntry(**{**values, "ranges": ranges})
