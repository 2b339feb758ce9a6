"""Scores over any number of batches, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from nnx.params import TaskSpec
from nnx.records import NNEvaluationDataPoint
from nnx.tasks import decoding
from nnx.tasks.counts import ClassCounts, ErrorSums, IndicatorCounts
from nnx.tasks.decoding import Decoded, Decoder, decode_batch
from nnx.tasks.scores import Scores

ExtraMetrics = Mapping[str, Callable[..., float]]


class ScoreAccumulator:
    """Counts of decoded batches; with ``keep_arrays`` also the decoded values."""

    def __init__(self, *, keep_arrays: bool = False) -> None:
        self.mode = decoding.UNSCORED
        self._counts: ClassCounts | IndicatorCounts | ErrorSums | None = None
        self._wrong: torch.Tensor | None = None
        self._pending: list[Decoded] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] | None = [] if keep_arrays else None

    def add(self, decoded: Decoded) -> None:
        if self._counts is None:
            self.mode = decoded.mode
            self._counts = _counter(decoded.mode)
        if decoded.mode != self.mode:
            raise ValueError(
                f"the loader mixes batches scored by {self.mode} with batches scored by "
                f"{decoded.mode}"
            )
        if isinstance(self._counts, ClassCounts):
            self._add_classes(decoded)
        elif self._counts is not None:
            self._counts.update(decoded.predicted, decoded.actual, decoded.mask())
        if decoded.wrong is not None:
            self._wrong = decoded.wrong if self._wrong is None else self._wrong | decoded.wrong
        if self._arrays is not None:
            self._arrays.append(valid_arrays(decoded))

    @property
    def scored(self) -> bool:
        """Whether the targets of every batch were labels or values to score."""
        labels = self._wrong is None or not bool(self._wrong)
        return labels and self.mode != decoding.UNSCORED

    def _add_classes(self, decoded: Decoded) -> None:
        """Count a large batch at once; small ones wait, to be counted together."""
        if len(decoded.actual) < _SMALL:
            # The targets are copied: a loader may fill its buffer again.
            self._pending.append(replace(decoded, actual=decoded.actual.clone()))
            if len(self._pending) == _TOGETHER:
                self._count_pending()
        else:
            self._count_pending()
            self._count(decoded)

    def _count_pending(self) -> None:
        waiting, self._pending = self._pending, []
        for _, run in groupby(waiting, key=_compatible):
            same = list(run)
            predicted, actual = (
                torch.cat([getattr(one, name) for one in same]) for name in ("predicted", "actual")
            )
            masks = [one.valid for one in same if one.valid is not None]
            valid = torch.cat(masks) if masks else None
            self._count(replace(same[0], predicted=predicted, actual=actual, valid=valid))

    def _count(self, decoded: Decoded) -> None:
        assert isinstance(self._counts, ClassCounts)
        self._counts.expect(decoded.width, trusted=decoded.trusted)
        self._counts.update(decoded.predicted, decoded.actual, decoded.mask())

    def state(self) -> dict[str, Any]:
        """Everything added, on the host, for :meth:`merge_state` in another process."""
        self._count_pending()
        return {
            "mode": self.mode,
            "counts": None if self._counts is None else self._counts.state(),
            "wrong": None if self._wrong is None else bool(self._wrong),
            "arrays": self._arrays,
        }

    def merge_state(self, state: Mapping[str, Any]) -> None:
        """Add what another accumulator of the same loader's rows holds."""
        theirs: Any = _counter(state["mode"])
        if theirs is None or state["counts"] is None:
            return
        theirs.load_state(state["counts"])
        if self._counts is None:
            self.mode, self._counts = state["mode"], _counter(state["mode"])
        if state["mode"] != self.mode:
            raise ValueError(
                f"one process scored its batches by {self.mode}, another by {state['mode']}"
            )
        self._count_pending()
        mine: Any = self._counts
        mine.merge(theirs)
        if state["wrong"]:
            self._wrong = torch.tensor(True)
        if self._arrays is not None:
            self._arrays += state["arrays"]

    def values(self) -> tuple[dict[str, Any], int]:
        """Record fields, and how many targets they are about."""
        self._count_pending()
        if not self.scored:
            return {}, 0
        if isinstance(self._counts, ErrorSums):
            return regression_values(*self._counts.totals())
        if isinstance(self._counts, IndicatorCounts):
            _, _, right, elements = self._counts.totals()
            return multilabel_values(self._counts.scores(), right, elements)
        if isinstance(self._counts, ClassCounts):
            return class_values(self._counts.scores()), self._counts.count
        return {}, 0

    def extra(self, extra_metrics: ExtraMetrics | None) -> dict[str, float]:
        """The user's metric functions on everything added."""
        if not extra_metrics or not self._arrays:
            return {}
        truth, guess = (np.concatenate([pair[i] for pair in self._arrays]) for i in (0, 1))
        return call_metrics(extra_metrics, truth, guess)


class Scored(Decoder, Protocol):
    """What of a ``TaskAdapter`` is scored."""

    @property
    def spec(self) -> TaskSpec: ...


class TaskMetricAccumulator:
    """Adds up prepared batches of a task; :meth:`result` gives the record of all of them.

    Counts and sums are all that is kept, unless ``keep_arrays`` also keeps the
    decoded values for ``extra_metrics``. ``bounded=True`` promises that memory
    does not grow with the samples, and so refuses ``keep_arrays``.
    """

    def __init__(
        self, adapter: Scored, *, keep_arrays: bool = False, bounded: bool = False
    ) -> None:
        if keep_arrays and bounded:
            raise ValueError("a bounded accumulator cannot keep the arrays of every sample")
        self._adapter = adapter
        self._keeps = keep_arrays
        self._scores = ScoreAccumulator(keep_arrays=keep_arrays)

    def update(self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> None:
        """Add one batch as :meth:`TaskAdapter.prepare` returns it."""
        self._scores.add(decode_batch(_NO_LOSS, self._adapter, output, target, valid))

    def result(
        self, *, loss: float | None, extra_metrics: ExtraMetrics | None = None
    ) -> NNEvaluationDataPoint:
        """The record of everything added.

        ``extra_metrics`` are called once each as ``fn(y_true, y_pred)`` on the
        valid targets, flattened to 1-D. When every target was masked the record
        has ``status="empty"``, no loss and no metrics.
        """
        if extra_metrics and not self._keeps:
            raise ValueError("extra_metrics need accumulator(keep_arrays=True)")
        fields, count = self._scores.values()
        extra = self._scores.extra(extra_metrics) if count else {}
        return task_record(self._adapter.spec.kind, fields, count, loss, extra)


def task_record(
    kind: str,
    fields: dict[str, Any],
    count: int,
    loss: float | None,
    extra: Mapping[str, float],
) -> NNEvaluationDataPoint:
    """A task's record of ``count`` valid targets; "empty" when there are none."""
    if not count:
        return NNEvaluationDataPoint(kind=kind, count=0, status="empty")
    return NNEvaluationDataPoint(
        **fields, loss=loss, extra=extra, kind=kind, count=count, status="ok"
    )


def call_metrics(
    extra_metrics: ExtraMetrics, truth: np.ndarray, guess: np.ndarray
) -> dict[str, float]:
    """Each of the user's functions as ``fn(y_true, y_pred)``."""
    values = {}
    for name, function in extra_metrics.items():
        value: Any = function(truth, guess)
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"extra_metrics[{name!r}] must return a number, not {type(value).__name__}"
            ) from error
    return values


def valid_arrays(decoded: Decoded) -> tuple[np.ndarray, np.ndarray]:
    """(targets, decisions) on the host without the masked ones.

    Class indices and unmasked indicator rows keep their shape; values of a
    masked task are flattened, since a row may be masked in part.
    """
    actual, predicted, valid = decoded.actual, decoded.predicted, decoded.mask()
    if valid is not None:
        actual, predicted = actual[valid], predicted[valid]
    if decoded.mode == decoding.INDICATORS:
        actual, predicted = actual.long(), predicted.long()
    return actual.cpu().numpy(), predicted.cpu().numpy()


def class_values(scores: Scores) -> dict[str, Any]:
    """Record fields of classification scores; the error is 1 - accuracy."""
    fields: dict[str, Any] = scores._asdict()
    fields["error"] = None if scores.accuracy is None else 1 - scores.accuracy
    return fields


def multilabel_values(scores: Scores, right: int, elements: int) -> tuple[dict[str, Any], int]:
    """Record fields of indicator scores, and the number of valid elements."""
    fields = class_values(scores)
    if elements:
        fields["metrics"] = {
            "subset_accuracy": scores.accuracy,
            "element_accuracy": right / elements,
        }
    return fields, elements


def regression_values(squared: float, absolute: float, elements: int) -> tuple[dict[str, Any], int]:
    """Record fields of error sums: ``mse`` and ``mae``, and the number of elements."""
    if not elements:
        return {}, 0
    return {"metrics": {"mse": squared / elements, "mae": absolute / elements}}, elements


def _compatible(decoded: Decoded) -> tuple[Any, ...]:
    """Batches that can be counted as one."""
    masked = decoded.valid is not None
    device = decoded.actual.device
    return decoded.width, decoded.ignored, decoded.trusted, masked, device, decoded.actual.dtype


_SMALL, _TOGETHER = 4096, 64


def _counter(mode: str) -> ClassCounts | IndicatorCounts | ErrorSums | None:
    if mode == decoding.CLASSES:
        return ClassCounts()
    if mode == decoding.INDICATORS:
        return IndicatorCounts()
    return ErrorSums() if mode == decoding.ERRORS else None


_NO_LOSS = nn.Identity()  # a task decodes without looking at the loss
