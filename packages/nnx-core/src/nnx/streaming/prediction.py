"""Predictions one batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nnx.data.loading import fast_batches
from nnx.errors import NNxError
from nnx.models import Model
from nnx.prediction import batches
from nnx.prediction.inference import build_result, check_spec, decide, to_array
from nnx.prediction.result import PredictionResult
from nnx.prediction.spec import ProbabilitySpec
from nnx.utils.modes import eval_mode


class StreamClosedError(RuntimeError, NNxError):
    """A prediction stream was used again after it was closed or iterated."""


@dataclass(frozen=True, slots=True, eq=False)
class PredictionBatch:
    """One batch of ``predict()``: raw outputs, decisions and the ids of the rows."""

    logits: np.ndarray
    classes: np.ndarray
    sample_ids: np.ndarray

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.logits)


class PredictionStream:
    """A context-managed, single-use iterator of predicted batches.

    Closing it, by ``close()``, at the end of its ``with`` block, or by an error
    inside it, drops its references to the model and to the loader's iterator;
    the loader stays the caller's. A closed stream is exhausted, like a closed
    generator; iterating or entering it again raises :class:`StreamClosedError`.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches: Iterator[Any] | None = batches
        self._started = False

    @property
    def closed(self) -> bool:
        """Whether the stream is used up or was closed."""
        return self._batches is None

    def close(self) -> None:
        """End the stream. Closing twice is fine."""
        batches, self._batches = self._batches, None
        finish = getattr(batches, "close", None)
        if callable(finish):
            finish()

    def __enter__(self) -> PredictionStream:
        if self.closed:
            raise StreamClosedError(_AGAIN.format("closed"))
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> PredictionStream:
        if self.closed or self._started:
            raise StreamClosedError(_AGAIN.format("closed" if self.closed else "partly consumed"))
        self._started = True
        return self

    def __next__(self) -> Any:
        self._started = True
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except BaseException:  # its end, or an error: either way it is over
            self.close()
            raise


_AGAIN = "the prediction stream is {}; ask iter_predict() for a new one"


def iter_predict(
    model: Model,
    X: Iterable[Any],
    spec: ProbabilitySpec | None = None,
    *,
    rich: bool = False,
) -> PredictionStream:
    """Predict over a loader, or another iterable of batches, holding one batch at a time.

    Yields a :class:`PredictionBatch` per batch; with ``spec``, or ``rich=True``
    for a model with a task, the ``PredictionResult`` that ``predict_proba``
    would give for it. Arrays, tensors and mappings in memory are for
    ``predict``. Each forward pass runs in eval mode; the net's own modes are
    back before its batch is yielded, so a consumer may train between batches.
    """
    if not batches.is_loader(X):
        raise TypeError(
            f"iter_predict() takes a loader or an iterable of batches, not {type(X).__name__}; "
            "pass in-memory inputs to predict() or predict_proba()"
        )
    if rich or spec is not None:
        check_spec(model, spec)
    return PredictionStream(_predicted(model, X, spec, rich or spec is not None))


def concatenate_predictions(
    batches: Iterable[PredictionBatch | PredictionResult],
) -> PredictionBatch | PredictionResult:
    """All batches as one: exactly what the eager calls return. Needs memory for all."""
    parts = list(batches)
    if not parts:
        raise ValueError("there are no batches to concatenate")
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise TypeError("cannot concatenate PredictionBatch with PredictionResult")
    if isinstance(first, PredictionBatch):
        return PredictionBatch(
            **{name: _column(parts, name) for name in ("logits", "classes", "sample_ids")}
        )
    if any(part.spec != first.spec for part in parts):  # type: ignore[union-attr]
        raise ValueError("cannot concatenate predictions made under different specs")
    unknown = [part.probabilities is None for part in parts]  # type: ignore[union-attr]
    if any(unknown) and not all(unknown):
        raise ValueError(
            "cannot concatenate predictions with probabilities and predictions without"
        )
    return PredictionResult(
        logits=_column(parts, "logits"),
        probabilities=None if all(unknown) else _column(parts, "probabilities"),
        decoded=_column(parts, "decoded"),
        sample_ids=_column(parts, "sample_ids"),
        spec=first.spec,
    )


def _predicted(
    model: Model, loader: Iterable[Any], spec: ProbabilitySpec | None, rich: bool
) -> Iterator[Any]:
    ids = batches.SampleIds(model, loader)
    for batch in fast_batches(loader):
        with eval_mode(model.net), batches.inference_context(model):
            output = batches.forward_inputs(model, batch)
        logits, sample_ids = to_array(output), ids.of(batch, len(output))
        del batch, output  # what the consumer does not keep is freed before the next forward
        if rich:
            yield build_result(model, logits, sample_ids, spec)
        else:
            yield PredictionBatch(
                logits=logits, classes=decide(model, logits), sample_ids=sample_ids
            )
        del logits, sample_ids


def _column(parts: list[Any], name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])
