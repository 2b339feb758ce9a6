"""Cohen's kappa (Cohen, 1960): agreement beyond what the label frequencies explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from nnx.monitors import MetricDefinition


class Kappa:
    """A confusion matrix of counts, so that it adds up batch by batch and part by part."""

    def __init__(self) -> None:
        self._counts = np.zeros((0, 0), dtype=np.int64)

    def update(self, target: np.ndarray, prediction: np.ndarray) -> None:
        """Add class indices, ``(n,)`` and ``(n,)``."""
        self._grow(1 + int(max(target.max(), prediction.max())))
        np.add.at(self._counts, (target.astype(np.int64), prediction.astype(np.int64)), 1)

    def result(self) -> float | None:
        total = self._counts.sum()
        if not total:
            return None
        expected = self._counts.sum(1) @ self._counts.sum(0) / total**2
        if expected == 1.0:  # one label only: chance alone explains all of it
            return None
        return float((np.trace(self._counts) / total - expected) / (1.0 - expected))

    def merge(self, other: Kappa) -> None:
        self._grow(len(other._counts))
        self._counts[: len(other._counts), : len(other._counts)] += other._counts

    def state(self) -> dict[str, Any]:
        """To continue in the middle of an epoch."""
        return {"counts": self._counts.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        counts = np.asarray(state["counts"], dtype=np.int64)
        self._counts = counts.reshape(len(counts), len(counts))

    def _grow(self, classes: int) -> None:
        missing = classes - len(self._counts)
        if missing > 0:
            self._counts = np.pad(self._counts, (0, missing))


def _check_config(config: Mapping[str, Any]) -> None:
    if config:
        raise ValueError(f"acme.kappa takes no config, not {dict(config)!r}")


KAPPA = MetricDefinition(
    id="acme.kappa",
    version=1,
    input="labels",
    mode="max",
    factory=lambda config: Kappa(),
    check_config=_check_config,
)
