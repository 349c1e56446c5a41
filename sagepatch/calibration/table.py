"""The full table of what a calibration measured: by layer, sampled call, candidate and head."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration.cells import Cell
from sagepatch.calibration.choose import Summary, exact_time
from sagepatch.calibration.estimate import completed, eligible
from sagepatch.calibration.merge import gathered, merged
from sagepatch.calibration.planning import solved
from sagepatch.calibration.sample import Remedy, Sample
from sagepatch.calibration.table_json import parsed, rendered
from sagepatch.plan import Plan, read_text, write_text

logger = logging.getLogger("sagepatch")


@dataclass(frozen=True, slots=True)
class LayerTable:
    """What was measured at one layer: a row a sampled call, and what was tried where fast recipes
    failed (in the order of cost).

    `runs` are the runs that measured each candidate, and exact attention, by name ("" for each that
    has none): of many runs not all rows are kept. By default those of the rows. `spoilt` counts the
    calls that were measured but are no samples, as their exact output was not finite.

    `names` are the candidates that may be chosen: those that no sample refused for cause and that
    two samples measured. `completed` are the rows with errors of all of them, estimated where there
    was no time to measure them (`calibration.estimate`).
    """

    site: str
    kind: str
    rows: tuple[Sample, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    runs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spoilt: int = 0
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    completed: tuple[Sample, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rows and not self.runs:
            object.__setattr__(self, "runs", runs_of(self.rows))
        object.__setattr__(self, "names", eligible(self.rows))
        object.__setattr__(self, "completed", completed(self.rows, self.names))

    @property
    def samples(self) -> int:
        """How many calls were measured."""
        return len(self.rows)

    @property
    def shapes(self) -> tuple[str, ...]:
        """The kinds of call that were measured, each once."""
        return tuple(dict.fromkeys(row.shape for row in self.rows))

    @property
    def dtype(self) -> str | None:
        """Of the first measured call."""
        return self.rows[0].dtype if self.rows else None

    @property
    def us_exact(self) -> float | None:
        """Median time of exact attention in microseconds, None where nothing was timed."""
        return exact_time(self.rows)

    @property
    def max_abs_v(self) -> float | None:
        """The largest |V| of all samples, None where nobody looked."""
        seen = [value for row in self.rows if row.statistics for value in row.statistics.v_max]
        return max(seen, default=None)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The candidates that plans pass over as too few samples had time for them."""
        skipped = dict.fromkeys(name for row in self.rows for name in row.skipped)
        refused = {name for row in self.rows for name in row.refused}
        return tuple(n for n in skipped if n not in self.names and n not in refused)

    def prompts(self, name: str = SDPA.name) -> int:
        """How many runs, usually prompts, measured a candidate; all that there were without one."""
        return len(self.runs.get(name, ()))

    @property
    def candidates(self) -> dict[str, Summary]:
        """Each candidate over all samples."""
        rows = self.completed
        return {name: Summary.of(name, rows) for name in self.names} if rows else {}

    @staticmethod
    def over(cell: Cell, names: Iterable[str]) -> dict[str, Summary]:
        """Candidates over the samples that decide on them in a part of the schedule."""
        return {name: Summary.of(name, cell.deciding(name)) for name in names}

    @property
    def timed(self) -> bool:
        """Whether exact attention and every candidate were timed."""
        names = set(self.names)
        return self.us_exact is not None and all(
            errors.us is not None
            for row in self.rows
            for name, errors in row.errors.items()
            if name in names
        )


def runs_of(rows: Iterable[Sample]) -> dict[str, tuple[str, ...]]:
    """The runs that measured each candidate, and exact attention, in samples of one process."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for name in (SDPA.name, *row.errors):
            found.setdefault(name, {})[row.run] = None
    return {name: tuple(runs) for name, runs in found.items()}


def outdated(layers: Iterable[LayerTable], versions: Mapping[str, int]) -> dict[str, str]:
    """The kernels measured in these layers that are gone or compute other numbers now, by name:
    what to say of each. `versions`: those that were measured, where that is known.
    """
    names = dict.fromkeys(name for one in layers for row in one.rows for name in row.errors)
    found = {}
    for name in names:
        known = BY_NAME.get(name)
        if known is None:
            found[name] = f"{name} is gone"
        elif versions.get(name, known.numerics_version) != known.numerics_version:
            now = known.numerics_version
            found[name] = f"{name} had numerics version {versions[name]}, it is version {now} now"
    return found


def without(layer: LayerTable, names: Collection[str]) -> LayerTable:
    """A layer's table without the measurements of some kernels."""
    rows = tuple(
        replace(row, errors={n: one for n, one in row.errors.items() if n not in names})
        for row in layer.rows
    )
    runs = {name: those for name, those in layer.runs.items() if name not in names}
    return replace(layer, rows=rows, runs=runs)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of every layer of one model on one machine.

    `runs` names the generations that ran to their end. `run_seconds` is their duration without the
    measuring, `measuring_seconds` that of the measuring, `preparing_seconds` that of compiling and
    checking kernels, which is done once on a machine. `kernels` are the numerics versions of
    kernels that were not measured with those of today; `stale` says which measurements of a file
    were left out for that.
    """

    fingerprint: str
    model: str
    emulated: bool
    gpu: str
    versions: dict[str, str | None]
    layers: tuple[LayerTable, ...]
    runs: tuple[str, ...] = ()
    run_seconds: float = 0.0
    measuring_seconds: float = 0.0
    preparing_seconds: float = 0.0
    kernels: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    stale: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def merge(self, *others: Calibration) -> Calibration:
        """This table and those of other processes or prompts as one, as if one process had seen all
        samples.

        Raises `InvalidArgument` where models, GPUs, versions or `emulate` differ.

        >>> plan = calibration.merge(another).plan()
        """
        return merged((self, *others))

    def gather(self) -> Calibration:
        """The tables of every process of `torch.distributed`'s default group, merged; each process
        must call it and gets the same.

        Raises `InvalidArgument` where no group was set up, and as `merge`.

        >>> plan = calibration.gather().plan()
        """
        return gathered(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as JSON, whole or not at all; raises `MachineError` where that fails."""
        write_text(path, rendered(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a table; raises `PlanError` for anything but one that this version wrote.
        Measurements of kernels that are gone or compute other numbers now are left out, with a
        warning.

        >>> calibration.save("table.json"); Calibration.load("table.json").plan(threshold=0.999)
        """
        values = parsed(read_text(path), os.fspath(path))
        layers = tuple(LayerTable(*layer) for layer in values.pop("layers"))
        versions = values.pop("kernels")
        told = outdated(layers, versions)
        if told:
            layers = tuple(without(layer, told) for layer in layers)
            left_out = "; ".join(told.values())
            logger.warning("sagepatch: measurements in %s are left out: %s", path, left_out)
        return cls(layers=layers, stale=tuple(told.values()), **values)

    def plan(
        self,
        threshold: float | None = None,
        *,
        budget: float | None = None,
        time_us: float | None = None,
        by_step: bool = True,
    ) -> Plan:
        """Solve the table; pure, and monotone in each bound. One of them at most.

        Args:
            threshold: the least cosine of every layer, in its worst head and sample (0.998).
            budget: the largest predicted relative error of the model's output, root mean square
                (`calibration.solve` has the error model), for instance 0.05.
            time_us: the most microseconds for one call of every layer, averaged over the schedule;
                the fastest plan where that cannot be reached. Needs a calibration that was timed,
                on a GPU.
            by_step: let a layer run different kernels in different parts of the schedule.

        Raises:
            InvalidArgument: two bounds, a bound below 0, or `time_us` where nothing was timed.

        >>> strict = calibration.plan(threshold=0.9995)
        """
        return solved(self, threshold, budget, time_us, by_step)
