"""Raw and calibrated probabilities side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedPrediction:
    """N rows with their raw logits, raw and calibrated probabilities (float64, (N, C)).

    ``decoded`` is the argmax of the raw logits; ``temperature`` is that of a
    temperature calibrator. ``override`` says what was
    accepted by name although the calibrator was not fitted on it.
    """

    logits: np.ndarray
    probabilities: np.ndarray
    calibrated_probabilities: np.ndarray
    decoded: np.ndarray
    labels: tuple[str, ...]
    sample_ids: np.ndarray
    calibrator_id: str
    model_id: str
    temperature: float | None
    override: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.logits)

    @property
    def argmax_changed(self) -> np.ndarray:
        """(N,) whether calibration makes another class strictly likelier; never by a temperature."""
        table = self.calibrated_probabilities
        return table[np.arange(len(table)), self.decoded] < table.max(1)

    def decoded_labels(self) -> np.ndarray:
        """The decisions by name, (N,)."""
        return np.asarray(self.labels, dtype=object)[self.decoded]
