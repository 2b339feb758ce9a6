"""Monotone curves from raw to calibrated probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import CalibrationError


def isotonic_curve(scores: np.ndarray, on: np.ndarray) -> tuple[list[float], list[float]]:
    """The knots of the isotonic regression of 0/1 ``on`` by ``scores`` (pool adjacent violators).

    Equal scores are one point, so that ties are calibrated alike.
    """
    values, place = np.unique(scores, return_inverse=True)
    weights = np.bincount(place).astype(np.float64)
    means = np.bincount(place, weights=on) / weights
    level: list[float] = []
    mass: list[float] = []
    size: list[int] = []
    for mean, weight in zip(means.tolist(), weights.tolist()):
        level.append(mean)
        mass.append(weight)
        size.append(1)
        while len(level) > 1 and level[-2] >= level[-1]:
            total = mass[-2] + mass[-1]
            level[-2] = (level[-2] * mass[-2] + level[-1] * mass[-1]) / total
            mass[-2], size[-2] = total, size[-2] + size[-1]
            del level[-1], mass[-1], size[-1]
    x: list[float] = []
    y: list[float] = []
    start = 0
    for height, length in zip(level, size):
        ends = [float(values[start]), float(values[start + length - 1])]
        for end in ends if length > 1 else ends[:1]:
            x.append(end)
            y.append(min(1.0, max(0.0, height)))
        start += length
    return x, y


def read_curve(x: Any, y: Any, at: np.ndarray) -> np.ndarray:
    """The curve's height ``at`` raw probabilities: linear between knots, constant beyond."""
    knots = np.asarray(x, dtype=np.float64)
    heights = np.asarray(y, dtype=np.float64)
    if knots.ndim != 1 or knots.shape != heights.shape or not len(knots):
        raise CalibrationError("a curve has as many x as y, at least one")
    if (np.diff(knots) < 0).any() or (np.diff(heights) < 0).any():
        raise CalibrationError("the knots of a curve never fall")
    if heights[0] < 0 or heights[-1] > 1:
        raise CalibrationError("the heights of a curve are in [0, 1]")
    return np.interp(at, knots, heights)
