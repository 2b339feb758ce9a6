"""The one place that says whether an epoch is better than the ones before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnx.monitors import MonitorTracker
from nnx.records import control_signal
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.params import MonitorRecord, MonitorSpec
    from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint


@dataclass(frozen=True, slots=True)
class Decision:
    """What one epoch's result means for BEST and for a plateau scheduler.

    ``plateau`` is the value to step a plateau scheduler on, ``None`` for no step.
    """

    improved: bool
    plateau: float | None
    record: MonitorRecord | None = None


class Judge:
    """Compares each epoch with the best so far, by the monitor or by the signal."""

    def __init__(self, tracker: MonitorTracker | None) -> None:
        self.tracker = tracker
        self.best = math.inf

    @staticmethod
    def of(monitor: MonitorSpec | None) -> Judge:
        """By ``monitor``, when there is one."""
        return Judge(None if monitor is None else MonitorTracker(monitor, warn_missing=True))

    def continue_from(self, best: NNIterationDataPoint) -> None:
        """Take over the value to beat from the epoch that was the best so far."""
        if self.tracker is None:
            self.best = control_signal(best).score
        elif best.selection is not None:
            self.tracker.best = best.selection.value

    def judge(
        self, idp: NNIterationDataPoint, summary: NNEvaluationDataPoint | None
    ) -> tuple[Decision, NNIterationDataPoint]:
        """The decision on an epoch, and its last record with the summary and selection."""
        idp = idp.with_epoch_summary(summary, None)
        decision = self._by_signal(idp) if self.tracker is None else self._by_monitor(idp)
        return decision, idp.with_epoch_summary(summary, decision.record)

    def _by_signal(self, idp: NNIterationDataPoint) -> Decision:
        signal = control_signal(idp)
        if signal.rejected:
            used = (
                f"used {signal.source}={signal.value} instead"
                if signal.source
                else "no metric available: the epoch has no finite value to be judged by"
            )
            if signal.diverged:
                used += ". An epoch whose loss is not finite is never BEST"
            warn_caller(
                f"epoch {idp.epoch_idx}: {', '.join(signal.rejected)} is not finite; {used}",
                RuntimeWarning,
            )
        elif signal.source is None:
            warn_caller(
                f"epoch {idp.epoch_idx}: no metric available: neither validation nor the last "
                "batch gave a loss or an error, so the epoch is not compared for BEST and a "
                "plateau scheduler does not step",
                RuntimeWarning,
            )
        improved = signal.score < self.best
        if improved:
            self.best = signal.score
        return Decision(improved, signal.value)

    def _by_monitor(self, idp: NNIterationDataPoint) -> Decision:
        tracker = self.tracker
        assert tracker is not None
        value = tracker.spec.value(train=idp.monitored_train_edp(), val=idp.val_edp)
        record = tracker.observe(value, epoch=idp.epoch_idx)
        if record.status == "missing":
            return Decision(record.improved, None, record)
        plateau = record.value
        if record.status == "nonfinite" or plateau is None:
            plateau = math.inf if tracker.spec.mode == "min" else -math.inf
        return Decision(record.improved, plateau, record)
