"""The whole-epoch training summary: never the last batch, never a mean of batch means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnx.models import Model
from nnx.monitors.declared import MetricSet
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.semantics import Semantics


class EpochSummary:
    """Sums over one training epoch.

    The loss is the summed numerators over the summed denominators (a total for
    a summed loss), the error is over the scored targets, and the declared
    metrics are over every valid sample.
    """

    def __init__(self, model: Model, metrics: Sequence[Any] = ()) -> None:
        self._model = model
        self._metrics = tuple(metrics)
        self.begin()

    def begin(self) -> None:
        """Forget everything; a new epoch starts."""
        self._set = MetricSet(self._metrics, Semantics.of(self._model)) if self._metrics else None
        self._loss = self._weight = self._total = 0.0
        self._summed = self._seen_loss = False
        self._wrong = self._scored = 0.0

    def add(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor | None,
        *,
        loss: float | None,
        denominator: float | None,
    ) -> None:
        """One batch of the default step; ``denominator=None`` is a summed loss."""
        if loss is not None and denominator is None:
            self._summed, self._seen_loss = True, True
            self._total += loss
        elif loss is not None and denominator:
            self._seen_loss = True
            self._loss += loss * denominator
            self._weight += denominator
        if self._set is not None:
            self._set.update(output, target, valid)

    def add_error(self, error: float | None, scored: float) -> None:
        """The error of a batch with ``scored`` targets."""
        if error is not None:
            self._wrong += error * scored
            self._scored += scored

    def add_record(self, record: NNEvaluationDataPoint, n_samples: int) -> None:
        """A custom step's record, weighted by its count or the batch's samples."""
        weight = float(n_samples if record.count is None else record.count)
        if record.loss is not None and weight:
            self._seen_loss = True
            self._loss += record.loss * weight
            self._weight += weight
        self.add_error(record.error, weight)

    def record(self, **fields: Any) -> NNEvaluationDataPoint:
        loss = None
        if self._seen_loss:
            loss = self._total if self._summed else self._loss / self._weight
        values: dict[str, Any] = {
            "loss": loss,
            "error": self._wrong / self._scored if self._scored else None,
            "metrics": {} if self._set is None else self._set.values(),
        }
        return NNEvaluationDataPoint(**{**values, **fields})

    def state(self) -> dict[str, Any]:
        return {
            "sums": [self._loss, self._weight, self._total, self._wrong, self._scored],
            "flags": [self._summed, self._seen_loss],
            "metrics": [] if self._set is None else self._set.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.begin()
        self._loss, self._weight, self._total, self._wrong, self._scored = state["sums"]
        self._summed, self._seen_loss = state["flags"]
        if self._set is not None:
            self._set.load_state(state["metrics"])
