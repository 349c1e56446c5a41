"""Means, spreads and bootstrap intervals of measurements; pure, knows nothing of models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, standard deviation (of the sample, n - 1) and count; `worst` is the lowest or the
    highest value, as the caller says what is bad.
    """

    mean: float
    sd: float
    n: int
    worst: float

    @classmethod
    def of(cls, values: list[float], *, low_is_bad: bool) -> Spread:
        """Sum up at least one value. Infinite ones (the PSNR of equal pictures) are left out of the
        mean and counted out of `n`.

        >>> Spread.of([1.0, 3.0], low_is_bad=True)
        Spread(mean=2.0, sd=1.4142135623730951, n=2, worst=1.0)
        """
        finite = [value for value in values if not math.isinf(value)]
        worst = (min if low_is_bad else max)(values)
        if not finite:
            return cls(math.inf, 0.0, 0, worst)
        mean = sum(finite) / len(finite)
        square = sum((value - mean) ** 2 for value in finite)
        sd = math.sqrt(square / (len(finite) - 1)) if len(finite) > 1 else 0.0
        return cls(mean, sd, len(finite), worst)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bootstrap interval of `CONFIDENCE`."""

    value: float
    low: float
    high: float


def ratio_interval(sums: Floats, counts: Floats, seed: int = 0) -> Interval:
    """Sum over sum, both [documents], with whole documents drawn again: the mean of a quantity that
    each document has `counts` of. One document has no interval: low and high are NaN.

    >>> ratio_interval(np.array([1.0, 1.0]), np.array([2.0, 2.0]))
    Interval(value=0.5, low=0.5, high=0.5)
    """
    value = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(value, math.nan, math.nan)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def frechet_distance(a: Floats, b: Floats) -> float:
    """Squared Frechet distance of two normal distributions fitted to features [n, channels]; the
    FID of Heusel et al. (arXiv 1706.08500) with features of the caller's. Needs n > channels.
    """
    if min(len(a), len(b)) <= a.shape[1]:
        return math.nan
    mean = a.mean(0) - b.mean(0)
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    # The trace of sqrt(A B) is that of the symmetric sqrt(sqrt(A) B sqrt(A)).
    root_a = _root(cov_a)
    cross = np.linalg.eigvalsh(root_a @ cov_b @ root_a).clip(min=0)
    trace = np.trace(cov_a) + np.trace(cov_b) - 2 * np.sqrt(cross).sum()
    return float(max(0.0, mean @ mean + trace))


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    root: Floats = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    return root
