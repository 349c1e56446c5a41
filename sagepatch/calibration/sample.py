"""What a calibration keeps of one sampled call of a layer: numbers a head, no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from sagepatch.schedule import fraction

# Nothing is chosen on fewer samples than these, of a layer and of a kernel.
FEWEST_SAMPLES = 2


class Worst(NamedTuple):
    """Each error of one call at its worst head."""

    cosine: float
    rel_l1: float
    rmse: float
    norm_ratio: float


@dataclass(frozen=True, slots=True)
class HeadErrors:
    """One candidate kernel on one sampled call against the exact output, one number a query head
    (`numerics.metrics.Metrics` says what each means).

    `us` is the kernel's time on such calls in microseconds, of the GPU or the host, whichever takes
    longer, `host_us` the host's alone; None where nothing was timed.
    `estimated`: nobody measured it on this call (`calibration.estimate`). `worst` and
    `cosine_mean`, over heads, follow from the rest.
    """

    finite: bool
    cosine: tuple[float, ...]
    rel_l1: tuple[float, ...]
    rmse: tuple[float, ...]
    norm_ratio: tuple[float, ...]
    us: float | None = None
    estimated: bool = False
    host_us: float | None = None
    worst: Worst = field(init=False, repr=False, compare=False)
    cosine_mean: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ratio = max(self.norm_ratio, key=lambda one: abs(one - 1))
        worst = Worst(min(self.cosine), max(self.rel_l1), max(self.rmse), ratio)
        object.__setattr__(self, "worst", worst)
        object.__setattr__(self, "cosine_mean", math.fsum(self.cosine) / len(self.cosine))

    @property
    def worst_head(self) -> int:
        """The head of the lowest cosine; a head that is not finite has cosine -1."""
        return self.cosine.index(self.worst.cosine)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the inputs of one sampled call look like, one number a head: it explains errors.

    `k_offset`: largest |mean over tokens| of a channel of K over the standard deviation of K around
    its channel means (key heads). `q_outlier`: largest |Q| over the root mean square of Q (query
    heads). `v_max`: largest |V| (value heads). `p_entropy`: mean entropy of the rows of P over
    that of an even spread over the keys a row sees: 1 even, 0 all on one key (query heads).
    """

    k_offset: tuple[float, ...]
    q_outlier: tuple[float, ...]
    v_max: tuple[float, ...]
    p_entropy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled call of a layer.

    `call` counts the layer's calls that can be samples from 1, anew in each run that has a name.
    `step` (from 0) of `steps` is the denoising step that made the call, None where there is no
    schedule. `shape` is `str(AttnSpec)`. `errors` maps a candidate's name to its errors. `run`
    tells generations apart (a short hash of prompt and seed, "" for a run that has no name).
    `skipped` are the candidates that nobody measured, as the time of a generation was spent;
    `refused` those of the kernels that calibration tries which cannot serve this call, or failed on
    it. `us_exact` and `host_us_exact` are exact attention's times, as in `HeadErrors`.
    """

    call: int
    step: int | None
    steps: int | None
    shape: str
    dtype: str
    errors: dict[str, HeadErrors] = field(default_factory=dict)
    statistics: Statistics | None = None
    us_exact: float | None = None
    run: str = ""
    skipped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    host_us_exact: float | None = None

    @property
    def at(self) -> float | None:
        """The place in the schedule, 0 in the first step and 1 in the last."""
        if self.step is None or self.steps is None:
            return None
        return fraction(self.step, self.steps)

    @property
    def place(self) -> str:
        """Which call this was, for people: "call 3", "call 3 (step 2 of 28)"."""
        step = "" if self.step is None else f" (step {self.step + 1} of {self.steps})"
        return f"call {self.call}{step}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change of the recipe `base` tried on a sampled call where that recipe failed: each error
    at its worst head. The first of a layer's has no name: it is what failed, unchanged.

    `variant` is a kernel that has the change, None where no kernel has it.
    """

    name: str
    base: str
    place: str
    cosine: float
    rel_l1: float
    norm_ratio: float
    variant: str | None
