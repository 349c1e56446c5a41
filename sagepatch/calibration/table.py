"""The full table of what a calibration measured: by layer, sampled call, candidate and head."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from sagepatch.calibration.choose import Summary, exact_time
from sagepatch.calibration.merge import gathered, merged
from sagepatch.calibration.planning import solved
from sagepatch.calibration.sample import Remedy, Sample
from sagepatch.calibration.table_json import parsed, rendered
from sagepatch.plan import Plan, read_text, write_text


@dataclass(frozen=True, slots=True)
class LayerTable:
    """What was measured at one layer: a row a sampled call, and what was tried where fast recipes
    failed (in the order of cost).
    """

    site: str
    kind: str
    rows: tuple[Sample, ...] = ()
    remedies: tuple[Remedy, ...] = ()

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
    def names(self) -> tuple[str, ...]:
        """The candidates that served every sample; one that could not is left out."""
        if not self.rows:
            return ()
        return tuple(n for n in self.rows[0].errors if all(n in row.errors for row in self.rows))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The candidates that plans pass over as some sample had no time for them."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.skipped))

    @property
    def candidates(self) -> dict[str, Summary]:
        """Each candidate over all samples."""
        return self.over(self.rows)

    def over(
        self, rows: tuple[Sample, ...], names: Iterable[str] | None = None
    ) -> dict[str, Summary]:
        """Each candidate, or those of these names, over some of the samples."""
        chosen = self.names if names is None else names
        return {name: Summary.of(name, rows) for name in chosen} if rows else {}

    @property
    def timed(self) -> bool:
        """Whether exact attention and every candidate were timed."""
        return self.us_exact is not None and all(
            row.errors[name].us is not None for row in self.rows for name in self.names
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of every layer of one model on one machine.

    `runs` names the generations that ran to their end. `run_seconds` is their duration without the
    measuring, `measuring_seconds` that of the measuring, `preparing_seconds` that of compiling and
    checking kernels, which is done once on a machine.
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

        >>> calibration.save("table.json"); Calibration.load("table.json").plan(threshold=0.999)
        """
        values = parsed(read_text(path), os.fspath(path))
        layers = tuple(LayerTable(*layer) for layer in values.pop("layers"))
        return cls(layers=layers, **values)

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
