"""How sure a row of probabilities is, and what it decides."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
from nnx.calibration.arrays import probability_matrix
from nnx.utils import validation as check

from .errors import AbstentionError

INPUT_FIELDS = ("probabilities", "calibrated_probabilities")
POLICY_KINDS = ("max_probability", "margin")
REASONS = MappingProxyType(
    {"max_probability": "below_probability_threshold", "margin": "small_margin"}
)


def scores(probabilities: Any, *, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Of (N, C) probabilities the predicted classes (N,) and their scores (N,), float64.

    "max_probability" scores the top probability, "margin" the gap between the
    top two, 0 at a tie. The prediction is the first class of maximal probability.
    """
    kind = one_of("kind", kind, POLICY_KINDS)
    table = probability_matrix(probabilities, AbstentionError, empty=True)
    return table.argmax(1), score(table, kind)


def score(table: np.ndarray, kind: str) -> np.ndarray:
    """The score of each row of checked probabilities."""
    if kind == "max_probability":
        return table.max(1)
    top = np.partition(table, -2, axis=1)[:, -2:]
    return top[:, 1] - top[:, 0]


def one_of(name: str, value: Any, options: tuple[str, ...]) -> str:
    """One of a few words, or an ``AbstentionError``."""
    try:
        return check.choice("abstention", name, value, options)
    except ValueError as error:
        raise AbstentionError(str(error)) from None


def unit(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    try:
        return float(check.real("abstention", name, value, at_least=0, at_most=1))
    except ValueError as error:
        raise AbstentionError(str(error)) from None
