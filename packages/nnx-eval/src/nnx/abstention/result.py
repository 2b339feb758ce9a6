"""What a policy decided, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from nnx.calibration.arrays import class_targets

from .coverage import CoverageReport
from .errors import AbstentionError
from .scores import REASONS


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row: what was predicted, how surely, and whether that stands.

    ``status`` is "accepted" or "abstained". An abstained row keeps everything
    and has a ``reason``.
    """

    sample_id: int | None
    status: str
    prediction: str
    prediction_index: int
    distribution: tuple[tuple[str, float], ...]
    score: float
    reason: str | None

    @property
    def accepted(self) -> bool:
        return self.status == "accepted"


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedRows:
    """The accepted rows alone: what a report of hard labels may read."""

    sample_ids: np.ndarray
    targets: np.ndarray
    predictions: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class AbstentionResult:
    """The decisions of a policy about N rows; arrays are (N,), probabilities (N, C)."""

    policy_id: str
    kind: str
    threshold: float
    input_field: str
    calibrator_id: str | None
    model_id: str
    labels: tuple[str, ...]
    sample_ids: np.ndarray
    probabilities: np.ndarray
    prediction: np.ndarray
    score: np.ndarray
    accepted: np.ndarray
    calibration_override: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.accepted)

    @property
    def abstained(self) -> np.ndarray:
        """The rows that the policy declined."""
        return ~self.accepted

    @property
    def accepted_ids(self) -> np.ndarray:
        return self.sample_ids[self.accepted]

    @property
    def abstained_ids(self) -> np.ndarray:
        return self.sample_ids[~self.accepted]

    @property
    def reasons(self) -> tuple[str | None, ...]:
        """Of each row why it was declined; ``None`` of an accepted one."""
        reason = REASONS[self.kind]
        return tuple(None if kept else reason for kept in self.accepted.tolist())

    def outcomes(self) -> tuple[Outcome, ...]:
        """Every row as a value of its own."""
        rows = zip(
            self.sample_ids.tolist(), self.accepted.tolist(), self.prediction.tolist(),
            self.probabilities.tolist(), self.score.tolist(), self.reasons,
        )  # fmt: skip
        return tuple(
            Outcome(
                sample_id=sample,
                status="accepted" if kept else "abstained",
                prediction=self.labels[index],
                prediction_index=index,
                distribution=tuple(zip(self.labels, row)),
                score=score,
                reason=reason,
            )
            for sample, kept, index, row, score, reason in rows
        )

    def accepted_rows(self, targets: Any) -> AcceptedRows:
        """The accepted rows with their (N,) class ``targets``; an abstention is no class."""
        classes = self._targets(targets)
        return AcceptedRows(
            sample_ids=self.accepted_ids,
            targets=classes[self.accepted],
            predictions=self.prediction[self.accepted],
        )

    def report(self, targets: Any) -> CoverageReport:
        """Coverage over every row, and risk over the accepted ones."""
        kept = self.accepted_rows(targets)
        return CoverageReport(
            policy_id=self.policy_id,
            total=len(self),
            accepted=len(kept.targets),
            incorrect=int((kept.targets != kept.predictions).sum()),
            sample_ids=self.sample_ids,
            accepted_ids=kept.sample_ids,
        )

    def _targets(self, targets: Any) -> np.ndarray:
        return class_targets(targets, len(self), len(self.labels), AbstentionError)
