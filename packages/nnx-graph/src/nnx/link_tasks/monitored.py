"""AUROC and average precision as declared metrics: they keep every score, for an exact order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from nnx.link_tasks.metrics import ranked
from nnx.monitors import MetricDefinition


class _Ranked:
    """Scores and targets of everything added, ranked when the value is read."""

    stores_scores = True

    def __init__(self, place: int) -> None:
        self._place = place
        self._scores: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []

    def update(self, target: np.ndarray, prediction: np.ndarray) -> None:
        self._targets.append(np.asarray(target, dtype=np.float64) == 1)
        self._scores.append(np.asarray(prediction, dtype=np.float64))

    def result(self) -> float | None:
        if not self._scores:
            return None
        return ranked(np.concatenate(self._scores), np.concatenate(self._targets))[
            self._place
        ].value


def _auroc(config: Mapping[str, Any]) -> _Ranked:
    return _Ranked(0)


def _average_precision(config: Mapping[str, Any]) -> _Ranked:
    return _Ranked(1)


AUROC = MetricDefinition(
    id="nnx.link_auroc", version=1, input="probabilities", mode="max", factory=_auroc
)
AVERAGE_PRECISION = MetricDefinition(
    id="nnx.link_ap", version=1, input="probabilities", mode="max", factory=_average_precision
)
