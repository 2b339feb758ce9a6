"""Evaluation and eager prediction of a model (see :mod:`nnx.prediction.batches`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nnx.data.loading import fast_batches
from nnx.models import Model
from nnx.monitors.declared import MetricSet, check_metrics
from nnx.params.registered import MetricSpec
from nnx.precision import full_precision
from nnx.prediction import batches
from nnx.prediction.result import (
    PredictionResult,
    PredictResult,
    check_logits,
    prediction_from_logits,
)
from nnx.prediction.spec import PredictionValidationError, ProbabilitySpec
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.accumulator import ScoreAccumulator, task_record
from nnx.tasks.adapters import known_width
from nnx.tasks.batch_error import BatchError
from nnx.tasks.counts import tensor_of, wide
from nnx.tasks.decoding import decode_batch
from nnx.tasks.losses import supervised_terms
from nnx.tasks.semantics import BERNOULLI, Semantics
from nnx.utils.modes import eval_mode

ExtraMetrics = Mapping[str, Callable[..., float]]


def evaluate(
    model: Model,
    loader: Iterable[Any],
    extra_metrics: ExtraMetrics | None = None,
    metrics: Sequence[MetricSpec] = (),
    *,
    combine: Callable[[EvaluationTotals], EvaluationTotals] | None = None,
    extra_batches: Iterable[Any] = (),
) -> NNEvaluationDataPoint:
    """The record of a whole loader: loss, scores, ``extra_metrics`` and declared ``metrics``.

    Everything is computed over the full sample, never averaged over batches,
    from counts and sums: memory does not grow with the loader, unless
    ``extra_metrics`` (called once on all decoded values) or a metric that
    stores its scores makes it. ``combine`` adds what other processes evaluated;
    ``extra_batches`` are batches that only run, where a forward takes all processes.
    Raises ``ValueError`` for an empty loader.
    """
    if extra_metrics is not None and not isinstance(extra_metrics, Mapping):
        raise TypeError(
            "extra_metrics must map names to functions of (y_true, y_pred), "
            f"not {type(extra_metrics).__name__}"
        )
    batches.refuse_frames(
        loader, "give batches of inputs and targets: DataLoader(TensorDataset(inputs, targets))"
    )
    check_metrics(model, metrics)
    totals = EvaluationTotals(model, metrics, keep_arrays=bool(extra_metrics))
    with eval_mode(model.net), batches.inference_context(model):
        for batch in fast_batches(loader):
            try:
                totals.add(*batches.forward_batch(model, batch))
            except BatchError as error:
                where = f"evaluation, batch {totals.batches}"
                raise BatchError(f"{where}: {error}") from error.__cause__
        for batch in extra_batches:
            batches.forward_batch(model, batch)
    if combine is not None:
        totals = combine(totals)
    if not totals.batches:
        raise ValueError("the loader yielded no batches: there is nothing to evaluate")
    return totals.record(extra_metrics)


class EvaluationTotals:
    """Counts, sums and loss terms of an evaluation."""

    def __init__(
        self, model: Model, metrics: Sequence[MetricSpec] = (), *, keep_arrays: bool = False
    ) -> None:
        self.batches = 0
        self._model = model
        self._keeps = keep_arrays
        self._scores = ScoreAccumulator(keep_arrays=keep_arrays)
        self._metrics = MetricSet(metrics, Semantics.of(model))
        self._numerator: Any = 0.0  # both stay on the device
        self._denominator: Any = 0.0
        self._summed = False

    def add(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Add one batch of raw outputs."""
        loss_fn, adapter = self._model.loss_fn, self._model.task_adapter
        terms = supervised_terms(loss_fn, adapter, output, target)
        self._scores.add(decode_batch(loss_fn, adapter, terms.output, terms.target, terms.valid))
        self._metrics.update(terms.output, terms.target, terms.valid)
        self._add_loss(terms.loss.detach(), terms.weight)
        self.batches += 1

    def _add_loss(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        self._summed = weight is None
        numerator: torch.Tensor | float
        if weight is None:
            weight, numerator = 0.0, wide(loss)
        elif loss.is_cpu:  # nothing to wait for: plain numbers are quicker than 0-d tensors
            weight = float(weight)
            numerator = loss.item() * weight if weight else 0.0
        else:  # a fully masked batch has a NaN loss and weighs nothing
            counts = torch.as_tensor(weight, device=loss.device)
            numerator = torch.where(counts != 0, wide(loss) * counts, 0)
        self._numerator = self._numerator + numerator
        self._denominator = self._denominator + weight

    def parts(self) -> dict[str, Any]:
        """Everything added, on the host, for :meth:`add_parts` in another process."""
        return {
            "batches": self.batches,
            "scores": self._scores.state(),
            "metrics": self._metrics.parts(),
            "sums": (float(self._numerator), float(self._denominator), self._summed),
        }

    def emptied(self) -> EvaluationTotals:
        """Totals of the same kind, with nothing added."""
        return EvaluationTotals(self._model, self._metrics.metrics, keep_arrays=self._keeps)

    def add_parts(self, parts: Mapping[str, Any]) -> None:
        """Add what another process evaluated."""
        if not parts["batches"]:
            return
        self.batches += parts["batches"]
        self._scores.merge_state(parts["scores"])
        self._metrics.merge(parts["metrics"])
        numerator, denominator, self._summed = parts["sums"]
        self._numerator = self._numerator + numerator
        self._denominator = self._denominator + denominator

    def loss(self) -> float | None:
        """The loss over everything added; ``None`` when every target was masked."""
        total, weight = float(self._numerator), float(self._denominator)
        if self._summed:
            return total
        return total / weight if weight else None

    def record(self, extra_metrics: ExtraMetrics | None = None) -> NNEvaluationDataPoint:
        """The record of everything added."""
        fields, count = self._scores.values()
        loss = self.loss() if count or not self._scores.scored else None
        adapter = self._model.task_adapter
        extra = self._scores.extra(extra_metrics) if count else {}
        if adapter is None:
            record = NNEvaluationDataPoint(**fields, loss=loss, extra=extra)
        else:
            record = task_record(adapter.spec.kind, fields, count, loss, extra)
        return with_metrics(record, self._metrics.values())


def with_metrics(
    record: NNEvaluationDataPoint, values: Mapping[str, float]
) -> NNEvaluationDataPoint:
    """``record`` with declared metrics; one of a task's own name replaces it."""
    return replace(record, metrics={**record.metrics, **values})


def predict(model: Model, X: Any) -> PredictResult:
    """``(logits, classes)`` of arrays, tensors, tuples, mappings or a loader."""
    logits = _joined([logits for logits, _ in _some(list(_outputs(model, X)))])
    return PredictResult(logits, decide(model, logits))


def predict_proba(model: Model, X: Any, spec: ProbabilitySpec | None = None) -> PredictionResult:
    """Logits, probabilities, decisions and sample ids of the same inputs as :func:`predict`."""
    check_spec(model, spec)
    parts = _some(list(_outputs(model, X, spec, with_ids=True)))
    logits = _joined([logits for logits, _ in parts])
    return build_result(model, logits, _joined([ids for _, ids in parts]), spec)


def check_spec(model: Model, spec: ProbabilitySpec | None) -> None:
    """Refuse a missing or wrong probability declaration before any forward pass."""
    if spec is not None and not isinstance(spec, ProbabilitySpec):
        raise PredictionValidationError(
            f"spec must be a ProbabilitySpec, not {type(spec).__name__}"
        )
    if spec is not None:
        _check_declared(model, spec)
    if spec is None and model.task_adapter is None:
        raise PredictionValidationError(
            "the model declares no task, so say what its outputs mean: "
            'ProbabilitySpec("categorical") or ProbabilitySpec("bernoulli")'
        )


def _check_declared(model: Model, spec: ProbabilitySpec) -> None:
    """Refuse what no output of this model can fit, as far as the model says."""
    if spec.class_axis == 0:
        spec.resolve_class_axis(2)
    # The outputs of a built-in net are (N, C), so that their last axis is axis 1.
    second = spec.class_axis == 1 or (spec.class_axis == -1 and model.net_params is not None)
    width = known_width(model) if second else None
    if None not in (width, spec.labels) and width != len(spec.labels or ()):
        raise PredictionValidationError(
            f"the spec names {len(spec.labels or ())} labels but the model has {width} outputs"
        )


def build_result(
    model: Model, logits: np.ndarray, sample_ids: np.ndarray, spec: ProbabilitySpec | None
) -> PredictionResult:
    """The result of raw outputs, by ``spec`` or by the model's task."""
    if spec is not None:
        return prediction_from_logits(logits, spec, sample_ids=sample_ids)
    return model.task_adapter.prediction(logits, sample_ids)


def decide(model: Model, logits: np.ndarray) -> np.ndarray:
    """``predict``'s classes: the task's decisions, else by the loss (0/1 or argmax of axis 1)."""
    adapter = model.task_adapter
    if adapter is not None:
        adapter.check_logits(logits)
        decided: np.ndarray = adapter.decode_array(logits)
        return decided
    semantics = Semantics.of(model)
    if logits.ndim < 2 and semantics.kind != BERNOULLI:
        raise ValueError(
            f"outputs of shape {logits.shape} have no class axis; declare the model's task "
            "(NNModelParams(task=TaskSpec...)) to say how they are decoded"
        )
    last = logits.ndim > 2 and batches.class_axis(model) == -1
    return semantics.decide(tensor_of(logits), -1 if last else 1).numpy()


def to_array(output: torch.Tensor) -> np.ndarray:
    """Raw outputs on the host; reduced precision becomes float32."""
    return full_precision(output).detach().cpu().numpy()


def _outputs(
    model: Model, X: Any, spec: ProbabilitySpec | None = None, *, with_ids: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """(logits, sample ids) of each batch; the net is in eval mode until the last one."""
    ids = batches.SampleIds(model, X)
    in_memory = not batches.is_loader(X)
    source = [batches.single_batch(model, X)] if in_memory else fast_batches(X)
    with eval_mode(model.net), batches.inference_context(model):
        for batch in source:
            output = batches.forward_inputs(model, batch, in_memory=in_memory)
            logits = to_array(output)
            if spec is not None:  # refused at the first batch, not after the last one
                check_logits(logits, spec)
            yield logits, ids.of(batch, len(output)) if with_ids else None


def _some(parts: list[Any]) -> list[Any]:
    if not parts:
        raise ValueError("the loader yielded no batches: there is nothing to predict")
    return parts


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
