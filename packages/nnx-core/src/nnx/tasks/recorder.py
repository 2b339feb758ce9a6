"""Records of every training batch, made in one pass over many batches.

A batch costs an argmax and a copy of its targets. Records are derived when
they are taken, for all pending batches at once; a bound on what is pending
keeps memory flat in epochs of any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from nnx.models import Model
from nnx.records import NNEvaluationDataPoint
from nnx.tasks import decoding, losses, scores
from nnx.tasks.accumulator import (
    ExtraMetrics,
    call_metrics,
    class_values,
    multilabel_values,
    regression_values,
    task_record,
    valid_arrays,
)
from nnx.tasks.counts import argmax, wide
from nnx.tasks.decoding import Decoded, decode_batch
from nnx.tasks.summary import EpochSummary

PENDING_ELEMENTS = 1 << 22
"""How many decoded elements may wait before records are made of them."""

Fields = tuple[dict[str, Any], int, int]
"""Record fields of a batch, its valid targets, and the targets its error is over."""


@dataclass(slots=True)
class _Pending:
    """A decoded batch that waits for its record; of regression, the errors alone."""

    decoded: Decoded
    loss: float | None

    @property
    def shape(self) -> tuple[str, int, torch.device]:
        """Batches of equal shape are scored together."""
        predicted = self.decoded.predicted
        width = predicted.shape[1] if self.decoded.mode == decoding.INDICATORS else 0
        return self.decoded.mode, width, predicted.device


# The common batch, kept as plainly as can be: decided classes, their targets, the loss.
_Plain = tuple[torch.Tensor, torch.Tensor, float | None]


class EpochRecorder:
    """The records of a training run's batches, and each epoch's summary.

    ``summarize`` collects the whole-epoch summary, with the declared ``metrics``.
    """

    def __init__(
        self,
        model: Model,
        *,
        extra_metrics: ExtraMetrics | None = None,
        metrics: Sequence[Any] = (),
        summarize: bool = False,
    ) -> None:
        self._model = model
        self._extra_metrics = dict(extra_metrics or {})
        self._pending: list[_Entry] = []
        self._elements = 0
        self._made: list[NNEvaluationDataPoint] = []
        self._summary = EpochSummary(model, metrics) if summarize or metrics else None
        self._plain_loss = self._loss_of_plain_batches()

    @property
    def summarizes(self) -> bool:
        """Whether a whole-epoch summary is collected, which reads each batch's denominator."""
        return self._summary is not None

    def begin_epoch(self) -> None:
        """Start the sums of a new epoch."""
        if self._summary is not None:
            self._summary.begin()

    def add(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor | None = None,
        *,
        loss: float | None,
        denominator: float | None = None,
    ) -> None:
        """Note one batch of the default step.

        ``output``, ``target`` and ``valid`` are those of ``SupervisedTerms``
        and may be overwritten afterwards; ``loss`` is the batch's loss and
        ``denominator`` what it was divided by (read only for a summary).
        """
        model = self._model
        plain = model.loss_fn is self._plain_loss and output.ndim == 2 and target.ndim == 1
        if plain and target.dtype == torch.int64:
            self._pending.append((argmax(output), target.clone(), loss))
            self._elements += target.shape[0]
            if self._elements > PENDING_ELEMENTS:
                self._make()
            return
        decoded = decode_batch(model.loss_fn, model.task_adapter, output, target, valid)
        if self._summary is not None:
            self._summary.add(output, target, valid, loss=loss, denominator=denominator)
        if decoded.mode == decoding.ERRORS:
            decoded.predicted = wide(decoded.predicted) - wide(decoded.actual)
            decoded.actual = decoded.predicted if not self._extra_metrics else target.clone()
        elif decoded.mode == decoding.UNSCORED:
            decoded.predicted = decoded.actual = output.new_empty(0)
        elif decoded.actual.data_ptr() == target.data_ptr():
            decoded.actual = decoded.actual.clone()  # a loader may fill its buffer again
        self._pending.append(_Pending(decoded, loss))
        self._elements += decoded.predicted.numel()
        if self._elements > PENDING_ELEMENTS:
            self._make()

    def add_record(self, record: NNEvaluationDataPoint, *, n_samples: int) -> None:
        """Note the record that a custom step returned for a batch of ``n_samples``."""
        self._pending.append(record)
        if self._summary is not None:
            self._summary.add_record(record, n_samples)

    def take(self, count: int | None = None) -> list[NNEvaluationDataPoint]:
        """The records of the batches since the last call, in order; the first ``count``."""
        self._make()
        made = self._made[:count]
        self._made = self._made[len(made) :]
        return made

    def summary(self, **fields: Any) -> NNEvaluationDataPoint | None:
        """The epoch's ``train_summary`` so far; ``fields`` replace its own (``loss=...``)."""
        self._make()
        return None if self._summary is None else self._summary.record(**fields)

    def state(self) -> dict[str, Any]:
        """The epoch's sums, to continue a summary from in the middle of an epoch."""
        self._make()
        return {} if self._summary is None else self._summary.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state`."""
        if self._summary is not None and state:
            self._summary.load_state(state)

    def _loss_of_plain_batches(self) -> Any:
        """The loss function whose batches need no decoding but an argmax, if this is one."""
        loss_fn = self._model.loss_fn
        decoded_by_task = self._model.task_adapter is not None
        if decoded_by_task or self._extra_metrics or self._summary is not None:
            return _PLAIN  # no loss function is this
        return loss_fn if losses.ignored_index(loss_fn) is not None else _PLAIN

    def _make(self) -> None:
        pending, self._pending, self._elements = self._pending, [], 0
        adapter = self._model.task_adapter
        kind = None if adapter is None else adapter.spec.kind
        for shape, run in groupby(pending, key=_shape):
            if shape is None:
                self._made.extend(run)  # type: ignore[arg-type]
            elif shape is _PLAIN:
                ignored = losses.ignored_index(self._plain_loss)
                self._made += _plain_records(list(run), ignored)  # type: ignore[arg-type]
            else:
                batches: list[_Pending] = list(run)  # type: ignore[arg-type]
                for record, scored in _records(kind, batches, self._extra_metrics):
                    self._made.append(record)
                    if self._summary is not None:
                        self._summary.add_error(record.error, scored)


def score_batch(
    model: Model, terms: Any, *, loss: float | None, extra_metrics: ExtraMetrics | None = None
) -> NNEvaluationDataPoint:
    """The record of one batch's ``SupervisedTerms``, at once."""
    recorder = EpochRecorder(model, extra_metrics=extra_metrics)
    recorder.add(terms.output, terms.target, terms.valid, loss=loss)
    return recorder.take()[0]


_Entry = _Pending | _Plain | NNEvaluationDataPoint
_PLAIN = object()


def _shape(entry: _Entry) -> Any:
    if type(entry) is tuple:
        return _PLAIN
    return entry.shape if isinstance(entry, _Pending) else None


def _plain_records(batches: list[_Plain], ignored: int | None) -> list[NNEvaluationDataPoint]:
    predicted = _host([batch[0] for batch in batches])
    actual = _host([batch[1] for batch in batches])
    group = np.repeat(np.arange(len(batches)), [len(batch[1]) for batch in batches])
    valid = actual != ignored
    if not valid.all():
        predicted, actual, group = predicted[valid], actual[valid], group[valid]
    table = scores.grouped_class_scores(actual, predicted, group, len(batches)).tolist()
    made = []
    for (_, _, loss), (accuracy, f1, recall, precision) in zip(batches, table):
        if accuracy != accuracy:  # NaN: every target was masked
            made.append(NNEvaluationDataPoint(loss=loss))
            continue
        record = NNEvaluationDataPoint(
            f1=f1, recall=recall, accuracy=accuracy, precision=precision, loss=loss,
            error=1 - accuracy,
        )  # fmt: skip
        made.append(record)
    return made


def _records(
    kind: str | None, batches: list[_Pending], extra_metrics: ExtraMetrics
) -> Iterable[tuple[NNEvaluationDataPoint, int]]:
    """Records of batches that share a shape, each with its number of scored targets."""
    decoded = [batch.decoded for batch in batches]
    flags = [d.wrong for d in decoded if d.wrong is not None]
    if flags:
        for one, unscored in zip(decoded, torch.stack(flags).tolist()):
            if unscored:
                one.predicted, one.actual = one.predicted[:0], one.actual[:0]
    for batch, (fields, count, scored) in zip(batches, _fields(decoded)):
        extra = _extra(batch.decoded, extra_metrics) if extra_metrics and count else {}
        if kind is not None:
            record = task_record(kind, fields, count, batch.loss, extra)
        else:
            record = NNEvaluationDataPoint(**fields, loss=batch.loss, extra=extra)
        yield record, scored


def _fields(decoded: list[Decoded]) -> Iterable[Fields]:
    """What the record of each batch says."""
    mode = decoded[0].mode
    if mode == decoding.UNSCORED:
        return [({}, 1, 0)] * len(decoded)
    lengths = np.array([d.predicted.shape[0] for d in decoded])
    group = np.repeat(np.arange(len(decoded)), lengths)
    predicted = _host([d.predicted for d in decoded])
    valid = _valid(decoded)
    if mode == decoding.CLASSES:
        return _class_fields(predicted, _host([d.actual for d in decoded]), valid, group, decoded)
    if mode == decoding.INDICATORS:
        return _indicator_fields(predicted, _host([d.actual for d in decoded]), valid, lengths)
    return _error_fields(predicted, valid, lengths)


def _class_fields(
    predicted: np.ndarray,
    actual: np.ndarray,
    valid: np.ndarray | None,
    group: np.ndarray,
    decoded: list[Decoded],
) -> Iterable[Fields]:
    if valid is not None:
        predicted, actual, group = predicted[valid], actual[valid], group[valid]
    table = scores.grouped_class_scores(actual, predicted, group, len(decoded))
    counts = np.bincount(group, minlength=len(decoded)).tolist()
    for (accuracy, f1, recall, precision), count in zip(table.tolist(), counts):
        figures = scores.Scores(accuracy, f1, recall, precision) if count else scores.NOTHING
        yield class_values(figures), count, count


def _indicator_fields(
    predicted: np.ndarray, actual: np.ndarray, valid: np.ndarray | None, lengths: np.ndarray
) -> Iterable[Fields]:
    if valid is None:
        valid = np.ones_like(predicted)
    right = predicted == actual
    counted: Any = valid.any(1)
    rows_are_right: Any = (right | ~valid).all(1)
    labels = [predicted & actual & valid, predicted & valid, actual & valid]
    hits, claimed, real = (_sums(values, lengths) for values in labels)
    averages = scores.grouped_indicator_scores(hits, claimed, real).tolist()
    rows_right = _sums(rows_are_right & counted, lengths).tolist()
    rows = _sums(counted, lengths).tolist()
    elements_right = _sums((right & valid).sum(1), lengths).tolist()
    elements = _sums(valid.sum(1), lengths).tolist()
    for index, (f1, recall, precision) in enumerate(averages):
        if not rows[index]:
            yield class_values(scores.NOTHING), 0, 0
            continue
        figures = scores.Scores(rows_right[index] / rows[index], f1, recall, precision)
        fields, count = multilabel_values(figures, elements_right[index], elements[index])
        yield fields, count, rows[index]


def _error_fields(
    errors: np.ndarray, valid: np.ndarray | None, lengths: np.ndarray
) -> Iterable[Fields]:
    errors = errors.astype(np.float64).reshape(len(errors), -1)
    counted = np.ones(errors.shape, bool) if valid is None else valid.reshape(errors.shape)
    errors = np.where(counted, errors, 0)
    squared = _sums((errors * errors).sum(1), lengths).tolist()
    absolute = _sums(np.abs(errors).sum(1), lengths).tolist()
    elements = _sums(counted.sum(1), lengths).tolist()
    return [(*regression_values(*sums), 0) for sums in zip(squared, absolute, elements)]


def _host(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(tensors).cpu().numpy()


def _valid(decoded: list[Decoded]) -> np.ndarray | None:
    """The masks of all batches, or ``None`` when nothing is masked."""
    ignored = decoded[0].ignored
    if all(d.valid is None and d.ignored == ignored for d in decoded):
        if ignored is None:
            return None
        kept = torch.cat([d.actual for d in decoded]) != ignored
    else:
        kept = torch.cat(
            [torch.ones_like(d.predicted, dtype=torch.bool) if m is None else m
             for d in decoded for m in (d.mask(),)]
        )  # fmt: skip
    mask = kept.cpu().numpy()
    return None if mask.all() else mask


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums over runs of rows; a run may be empty."""
    values = values.astype(np.int64) if values.dtype.kind == "b" else values
    out = np.zeros((len(lengths), *values.shape[1:]), values.dtype)
    filled = lengths > 0
    if filled.any():
        starts = (np.cumsum(lengths) - lengths)[filled]
        out[filled] = np.add.reduceat(values, starts, axis=0)
    return out


def _extra(decoded: Decoded, extra_metrics: ExtraMetrics) -> dict[str, float]:
    if decoded.mode == decoding.UNSCORED:
        return {}
    if decoded.mode == decoding.ERRORS:  # predicted holds the errors
        target = decoded.actual
        guess = (decoded.predicted + wide(target)).to(target.dtype)
        decoded = Decoded(decoding.ERRORS, guess, target, decoded.valid)
    truth, guess_array = valid_arrays(decoded)
    return call_metrics(extra_metrics, truth, guess_array)
