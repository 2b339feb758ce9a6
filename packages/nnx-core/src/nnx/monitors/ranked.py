"""Metrics of an order: the area under the ROC curve, and average precision.

They keep every score, because only all of them together have an order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nnx.monitors.builtin import check_empty
from nnx.monitors.registry import MetricDefinition

Array = np.ndarray
# Takes scores and which of them are positive, both ``(n,)`` with some of either kind.
Area = Callable[[Array, Array], float]


class Ranked:
    """``area`` of the scores of every class against the rest, averaged over the classes.

    Of two classes it is that of the second, and of independent outputs that of all their
    scores at once. A class that has no row, or every row, is left out; the value is ``None``
    when that leaves none.
    """

    stores_scores = True

    def __init__(self, area: Area) -> None:
        self._area = area
        self._targets: list[Array] = []
        self._scores: list[Array] = []

    def update(self, target: Array, prediction: Array) -> None:
        if target.ndim == 2:  # shares of the classes: the one that they decide
            target = target.argmax(axis=1)
        self._targets.append(np.array(target))
        self._scores.append(np.array(prediction))

    def merge(self, other: Ranked) -> None:
        self._targets += other._targets
        self._scores += other._scores

    def result(self) -> float | None:
        if not self._scores:
            return None
        targets, scores = np.concatenate(self._targets), np.concatenate(self._scores)
        if scores.ndim == 1:
            return self._of(scores, targets == 1)
        if scores.shape[1] == 2:
            return self._of(scores[:, 1], targets == 1)
        areas = [self._of(scores[:, c], targets == c) for c in range(scores.shape[1])]
        known = [area for area in areas if area is not None]
        return sum(known) / len(known) if known else None

    def _of(self, scores: Array, positive: Array) -> float | None:
        if positive.all() or not positive.any():
            return None
        return self._area(scores.astype(np.float64), positive)

    def state(self) -> dict[str, Any]:
        return {
            name: [torch.from_numpy(part) for part in parts]
            for name, parts in (("targets", self._targets), ("scores", self._scores))
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._targets = [part.numpy() for part in state["targets"]]
        self._scores = [part.numpy() for part in state["scores"]]


def _curve(scores: Array, positive: Array) -> tuple[Array, Array]:
    """How many positives and negatives score at least as much, from the highest score down."""
    order = np.argsort(scores, kind="stable")[::-1]
    descending = scores[order]
    last = np.append(np.flatnonzero(descending[1:] != descending[:-1]), len(scores) - 1)
    true = np.cumsum(positive[order])[last].astype(np.float64)
    return true, last + 1.0 - true


def auroc(scores: Array, positive: Array) -> float:
    """How likely a positive scores above a negative; ties count half."""
    true, false = _curve(scores, positive)
    below = false[-1] - false + np.diff(false, prepend=0.0) / 2
    return float(np.diff(true, prepend=0.0) @ below) / (true[-1] * false[-1])


def average_precision(scores: Array, positive: Array) -> float:
    """The precision at every distinct score, weighted by the recall that it adds."""
    true, false = _curve(scores, positive)
    return float(np.diff(true, prepend=0.0) @ (true / (true + false))) / true[-1]


def _define(id: str, area: Area) -> MetricDefinition:
    return MetricDefinition(
        id=id, version=1, input="probabilities", mode="max", factory=lambda config: Ranked(area),
        check_config=check_empty,
    )  # fmt: skip


AUROC = _define("auroc", auroc)
AVERAGE_PRECISION = _define("average_precision", average_precision)
