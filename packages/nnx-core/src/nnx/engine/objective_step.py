"""One microbatch of an objective: its terms, the update they complete, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.engine.update import UpdateEngine
from nnx.engine.window import Applied
from nnx.objectives import ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import SupervisedResult
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.recorder import EpochRecorder

if TYPE_CHECKING:
    from nnx.models import Model
    from nnx.precision import ResolvedPrecision


@dataclass(slots=True)
class ObjectiveOutcome:
    """What an objective returned for a microbatch, and what the engine made of it."""

    result: ObjectiveResult
    applied: Applied

    @property
    def record(self) -> NNEvaluationDataPoint:
        """The microbatch's record, with its loss."""
        record = self.result.record
        if record is None:
            return NNEvaluationDataPoint(loss=self.applied.value)
        if record.loss is None and self.applied.value is not None:
            return record.with_loss(self.applied.value)
        return record

    def add_to(self, recorder: EpochRecorder, *, n_samples: int) -> None:
        """Hand the record over; one that is scored from outputs is made with its epoch."""
        if isinstance(self.result, SupervisedResult):
            scored = self.result.supervised
            recorder.add(
                scored.output, scored.target, scored.valid, loss=self.applied.value,
                denominator=scored.denominator,
            )  # fmt: skip
        else:
            recorder.add_record(self.record, n_samples=n_samples)


class ObjectiveStep:
    """Runs an objective on the update engine of its run."""

    def __init__(
        self,
        model: Model,
        objective: Callable[[ObjectiveContext], ObjectiveResult],
        engine: UpdateEngine,
        precision: ResolvedPrecision,
        extra_metrics: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.engine = engine
        self.precision = precision
        self.extra_metrics = extra_metrics
        self._after_update = getattr(objective, "after_update", None)

    def __call__(
        self, batch: Any, *, epoch_idx: int, batch_idx: int, is_last: bool
    ) -> ObjectiveOutcome:
        """Train on one microbatch.

        ``after_update`` has run when this returns; the events in
        ``outcome.applied.events`` are for the callbacks.
        """
        ctx = ObjectiveContext(
            self.model, batch, epoch_idx, batch_idx, self.extra_metrics, self.precision
        )
        try:
            with self.precision.autocast():
                result: object = self.objective(ctx)
        except BaseException:
            self.engine.discard()
            raise
        if not isinstance(result, ObjectiveResult):
            self.engine.discard()
            raise TypeError(
                f"an objective must return an ObjectiveResult, not {type(result).__name__}; for "
                'example ObjectiveResult([LossTerm("loss", losses.sum(), len(losses))])'
            )
        applied = self.engine.apply(
            result, epoch_idx=epoch_idx, batch_idx=batch_idx, is_last=is_last
        )
        self._notify(applied)
        return ObjectiveOutcome(result, applied)

    def close(self, *, epoch_idx: int, batch_idx: int) -> Applied:
        """Close a window that the end of the epoch cut short."""
        applied = self.engine.close(epoch_idx=epoch_idx, batch_idx=batch_idx)
        self._notify(applied)
        return applied

    def _notify(self, applied: Applied) -> None:
        if applied.events and self._after_update is not None:
            self._after_update(applied.events)
