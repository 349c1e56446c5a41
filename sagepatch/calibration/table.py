"""The full table of what a calibration measured, and plans solved from it without running."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagepatch.backends.catalogue import BY_NAME, SDPA
from sagepatch.calibration import solve as solver
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.choose import FEWEST_SAMPLES, Summary, choose
from sagepatch.calibration.merge import gathered, merged
from sagepatch.errors import InvalidArgument
from sagepatch.numerics.recipe import TIERS
from sagepatch.plan import DEFAULT_THRESHOLD, Plan, PlanEntry


@dataclass(frozen=True, slots=True)
class LayerTable:
    """What was measured at one layer; `shapes` describes the sampled calls, each kind once."""

    site: str
    kind: str
    samples: int
    shapes: tuple[str, ...]
    dtype: str | None
    us_exact: float | None
    max_abs_v: float | None
    candidates: dict[str, Summary]

    @classmethod
    def of(cls, site: str, kind: str, table: LayerCalibration) -> LayerTable:
        """Freeze a layer's running calibration."""
        specs = table.specs
        return cls(
            site,
            kind,
            table.samples,
            tuple(dict.fromkeys(str(spec) for spec in specs)),
            specs[0].dtype if specs else None,
            table.us_exact,
            table.max_abs_v,
            table.summaries(),
        )

    @property
    def timed(self) -> bool:
        """Whether exact attention and every candidate were timed."""
        times = [self.us_exact, *(summary.us for summary in self.candidates.values())]
        return None not in times

    def options(self) -> list[solver.Option]:
        """What a solver may choose from: exact attention, and every candidate that stayed finite.

        Costs are times where everything was timed, else the rank of the tier.
        """
        timed = self.timed
        exact = self.us_exact if timed and self.us_exact is not None else TIERS.index("exact")
        options = [solver.Option(SDPA.name, 0.0, float(exact))]
        if self.samples < FEWEST_SAMPLES:
            return options
        for name, summary in self.candidates.items():
            if summary.finite:
                cost = summary.us if timed and summary.us is not None else None
                rank = TIERS.index(BY_NAME[name].tier)
                error = solver.relative_error(summary.cosine_mean)
                options.append(solver.Option(name, error, float(rank if cost is None else cost)))
        return options

    def entry(self, threshold: float) -> PlanEntry:
        """Choose this layer's kernel at `threshold`."""
        choice = choose(
            self.candidates, samples=self.samples, threshold=threshold, us_exact=self.us_exact
        )
        return self.entry_of(choice.variant, choice.reason, choice.alternatives)

    def entry_of(
        self, variant: str, reason: str, alternatives: tuple[str, ...] | None = None
    ) -> PlanEntry:
        """The entry for a chosen kernel; alternatives are those no less accurate, unless given."""
        shown = self.candidates.get(variant)
        if alternatives is None:
            alternatives = tuple(
                name
                for name, other in self.candidates.items()
                if shown is not None and name != variant and other.cosine >= shown.cosine
            )
        return PlanEntry(
            site=self.site,
            kind=self.kind,
            variant=variant,
            numerics_version=BY_NAME[variant].numerics_version,
            reason=reason,
            samples=self.samples,
            shapes=self.shapes,
            dtype=self.dtype,
            cosine=None if shown is None else shown.cosine,
            cosine_mean=None if shown is None else shown.cosine_mean,
            rel_l1=None if shown is None else _finite(shown.rel_l1),
            rmse=None if shown is None else shown.rmse,
            norm_ratio=None if shown is None else _finite(shown.norm_ratio),
            worst_head=None if shown is None else shown.worst_head,
            worst_call=None if shown is None else shown.worst_call,
            max_abs_v=_finite(self.max_abs_v),
            us_exact=self.us_exact,
            us_chosen=self.us_exact if shown is None else shown.us,
            alternatives={name: BY_NAME[name].numerics_version for name in alternatives},
        )


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: against an all-zero reference some errors are infinite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of every layer of one model on one machine."""

    fingerprint: str
    model: str
    emulated: bool
    gpu: str
    versions: dict[str, str | None]
    layers: tuple[LayerTable, ...]

    def merge(self, *others: Calibration) -> Calibration:
        """This table and those of other processes or prompts as one: the worst error of all counts.

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

    def plan(
        self,
        threshold: float | None = None,
        *,
        budget: float | None = None,
        time_us: float | None = None,
    ) -> Plan:
        """Solve the table; pure, and monotone in each bound. One of them at most.

        Args:
            threshold: the least cosine of every layer, in its worst head and sample (0.998).
            budget: the largest predicted relative error of the model's output, root mean square
                (`calibration.solve` has the error model), for instance 0.05.
            time_us: the most microseconds for one call of every layer; the fastest plan where that
                cannot be reached. Needs a calibration that was timed, on a GPU.

        Raises:
            InvalidArgument: two bounds, a bound below 0, or `time_us` where nothing was timed.

        >>> strict = calibration.plan(threshold=0.9995)
        """
        bounds = {"threshold": threshold, "budget": budget, "time_us": time_us}
        given = {name: value for name, value in bounds.items() if value is not None}
        if len(given) > 1:
            raise InvalidArgument(f"{' and '.join(given)} exclude each other: pass one of them")
        if budget is None and time_us is None:
            least = DEFAULT_THRESHOLD if threshold is None else threshold
            return self._plan(least, tuple(layer.entry(least) for layer in self.layers))
        ((name, bound),) = given.items()
        if not bound >= 0:
            raise InvalidArgument(f"{name} is {bound}, needs a number from 0 up")
        untimed = [layer.site for layer in self.layers if layer.candidates and not layer.timed]
        if time_us is not None and untimed:
            raise InvalidArgument(
                f"time_us needs measured times, and layers such as {untimed[0]} have none: "
                "calibrate on a GPU, or pass budget or threshold"
            )
        options = [layer.options() for layer in self.layers]
        solve = solver.within_error if budget is not None else solver.within_time
        chosen = solve(options, bound)
        predicted = solver.combined([option.error for option in chosen])
        why = f"{name} {bound:g}: the output is predicted to be off by {predicted:.4f}"
        entries = tuple(
            layer.entry_of(option.variant, f"{why}, of which this layer {option.error:.4f}")
            for layer, option in zip(self.layers, chosen, strict=True)
        )
        # What every layer of this plan keeps, as a threshold would say it.
        kept = [entry.cosine for entry in entries if entry.cosine is not None]
        return self._plan(min(kept, default=1.0), entries)

    def _plan(self, threshold: float, entries: tuple[PlanEntry, ...]) -> Plan:
        return Plan(
            self.fingerprint,
            self.model,
            threshold,
            self.emulated,
            self.gpu,
            self.versions,
            entries,
        )
