"""Finer reports: adaptive bins, each class, a debiased error, and intervals by resampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from nnx.utils import validation as check

from .arrays import class_targets, probability_matrix
from .errors import CalibrationError
from .metrics import ReliabilityBin, bins_of, expected_calibration_error, top_one


def _checked(probabilities: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
    table = probability_matrix(probabilities, CalibrationError)
    return table, class_targets(targets, len(table), table.shape[1], CalibrationError)


def _edges(confidence: np.ndarray, n_bins: int) -> np.ndarray:
    """Edges of bins with equally many rows; equal confidences are never parted."""
    n_bins = check.count("calibration", "n_bins", n_bins)
    ordered = np.sort(confidence)
    places = (round(i * len(ordered) / n_bins) for i in range(1, n_bins))
    inner = ordered[[place for place in places if place < len(ordered)]]
    return np.unique(np.concatenate([[0.0], inner, [1.0]]))


def adaptive_bins(
    probabilities: Any, targets: Any, *, n_bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """Reliability bins with equally many rows (Nguyen & O'Connor, 2015); fewer where rows tie."""
    confidence, right = top_one(*_checked(probabilities, targets))
    return bins_of(confidence, right, _edges(confidence, n_bins))


def classwise_ece(probabilities: Any, targets: Any, *, n_bins: int = 10) -> tuple[float, ...]:
    """Of each class the calibration error of its own probability (Kull et al., 2019)."""
    table, classes = _checked(probabilities, targets)
    edges = np.arange(check.count("calibration", "n_bins", n_bins) + 1) / n_bins
    found = (
        expected_calibration_error(bins_of(table[:, c], classes == c, edges))
        for c in range(table.shape[1])
    )
    return tuple(value or 0.0 for value in found)


def debiased_calibration_error(probabilities: Any, targets: Any, *, n_bins: int = 15) -> float:
    """The root of the squared error over adaptive bins, less its bias (Kumar, Liang & Ma, 2019).

    The plain estimate of a calibrated model is above 0 by chance alone; this one is not.
    A bin of one row, whose bias is unknown, is left out.
    """
    total, rows = 0.0, 0
    for b in adaptive_bins(probabilities, targets, n_bins=n_bins):
        if b.confidence is None or b.accuracy is None or b.count < 2:
            continue
        bias = b.accuracy * (1 - b.accuracy) / (b.count - 1)
        total += b.count * ((b.accuracy - b.confidence) ** 2 - bias)
        rows += b.count
    return math.sqrt(max(0.0, total / rows)) if rows else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval at ``level``."""

    estimate: float
    lower: float
    upper: float
    level: float


def bootstrap_interval(
    metric: Callable[[np.ndarray, np.ndarray], float],
    probabilities: Any,
    targets: Any,
    *,
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The percentile interval of ``metric(probabilities, targets)`` over resampled rows.

    The draws come from their own generator, seeded by ``seed``.
    """
    table, classes = _checked(probabilities, targets)
    draws = check.count("bootstrap_interval", "draws", draws, at_least=2)
    level = float(check.real("bootstrap_interval", "level", level, above=0, below=1))
    random = np.random.default_rng(seed)
    found = np.empty(draws)
    for i in range(draws):
        rows = random.integers(0, len(table), len(table))
        found[i] = metric(table[rows], classes[rows])
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(metric(table, classes)), float(low), float(high), level)
