"""The full table of what a calibration measured, and plans solved from it without running."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sagepatch.backends.catalogue import BY_NAME
from sagepatch.calibration.capture import LayerCalibration
from sagepatch.calibration.choose import Summary, choose
from sagepatch.plan import Plan, PlanEntry


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

    def entry(self, threshold: float) -> PlanEntry:
        """Choose this layer's kernel at `threshold`."""
        choice = choose(
            self.candidates, samples=self.samples, threshold=threshold, us_exact=self.us_exact
        )
        shown = self.candidates.get(choice.variant)
        return PlanEntry(
            site=self.site,
            kind=self.kind,
            variant=choice.variant,
            numerics_version=BY_NAME[choice.variant].numerics_version,
            reason=choice.reason,
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
            alternatives={name: BY_NAME[name].numerics_version for name in choice.alternatives},
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

    def plan(self, threshold: float = 0.998) -> Plan:
        """Solve for a threshold; pure, and monotone: a higher one never admits more.

        >>> strict = calibration.plan(threshold=0.9995)
        """
        return Plan(
            self.fingerprint,
            self.model,
            threshold,
            self.emulated,
            self.gpu,
            self.versions,
            tuple(layer.entry(threshold) for layer in self.layers),
        )
