"""Declared metrics that can be accumulated apart and merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nnx.monitors.builtin import F1, BuiltinAccumulator
from nnx.monitors.declared import Views, check_inputs
from nnx.params.registered import MetricSpec
from nnx.params.task import TaskSpec
from nnx.streaming.inputs import ARGUMENTS, GivenViews, check_range, check_width, target_mask
from nnx.tasks.semantics import SEMANTICS, Semantics
from nnx.utils import validation as check
from nnx.utils.jsonlike import FrozenDict


class MetricMergeError(ValueError):
    """Two accumulations that describe different quantities."""


@dataclass(frozen=True, slots=True)
class MetricSnapshot:
    """Values over ``count`` valid samples; ``unavailable`` names the metrics without one."""

    count: int
    values: Mapping[str, float] = field(default_factory=dict)
    unavailable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", FrozenDict(self.values))

    @property
    def available(self) -> tuple[str, ...]:
        """The names of the metrics that have a value; empty when nothing was scored."""
        return tuple(self.values)


class StreamingMetrics:
    """Accumulates :class:`MetricSpec` metrics over batches, shards or processes.

    ``semantics`` says what outputs mean: "categorical" (softmax over axis 1),
    "bernoulli" (independent sigmoids, on from ``threshold``) or "continuous".
    ``labels`` and ``num_outputs`` name and count the classes or outputs, and
    ``ignore_index`` is the categorical target that is not scored. Memory is
    bounded by the number of classes; a metric that must store its scores is
    refused unless ``materialize`` allows O(N) memory for it.
    """

    def __init__(
        self,
        metrics: Sequence[MetricSpec],
        semantics: str,
        *,
        labels: Sequence[str] | None = None,
        threshold: float = 0.5,
        materialize: bool = False,
        ignore_index: int | None = None,
        num_outputs: int | None = None,
    ) -> None:
        owner = "StreamingMetrics"
        self._metrics = tuple(metrics)
        self._labels = None if labels is None else tuple(labels)
        check.choice(owner, "semantics", semantics, SEMANTICS)
        threshold = check.real(owner, "threshold", threshold, at_least=0, at_most=1)
        if self._labels is not None:
            if num_outputs is not None and len(self._labels) != num_outputs:
                check.refuse(owner, "labels", self._labels, f"{num_outputs} names")
            num_outputs = len(self._labels)
        if num_outputs is not None:
            num_outputs = check.count(owner, "num_outputs", num_outputs)
        if ignore_index is not None:
            ignore_index = check.integer(owner, "ignore_index", ignore_index)
            if semantics != "categorical":
                check.refuse(owner, "ignore_index", ignore_index, f"None for {semantics}")
        self._semantics = Semantics(semantics, threshold, ignore_index)
        self._num_outputs = num_outputs
        check_inputs(self._metrics, self._semantics, owner=f"{owner}.metrics")
        self._materialize = materialize
        self._parts: list[Any] = [self._part(i, spec) for i, spec in enumerate(self._metrics)]
        self._count = 0

    @classmethod
    def for_task(
        cls, metrics: Sequence[MetricSpec], task: TaskSpec, *, materialize: bool = False
    ) -> StreamingMetrics:
        """An accumulation with a task's semantics, labels, threshold and ignore_index."""
        return cls(
            metrics,
            Semantics.of_task(task).kind,
            labels=task.labels,
            threshold=task.threshold,
            materialize=materialize,
            ignore_index=task.ignore_index,
            num_outputs=task.num_outputs,
        )

    @property
    def metrics(self) -> tuple[MetricSpec, ...]:
        return self._metrics

    @property
    def semantics(self) -> str:
        return self._semantics.kind

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self._labels

    @property
    def num_outputs(self) -> int | None:
        return self._num_outputs

    @property
    def threshold(self) -> float:
        return self._semantics.threshold

    @property
    def ignore_index(self) -> int | None:
        return self._semantics.ignored

    @property
    def bounded(self) -> bool:
        """Whether memory is independent of the number of samples."""
        return not any(isinstance(part, _Stored) for part in self._parts)

    @property
    def count(self) -> int:
        """How many valid samples were added."""
        return self._count

    def update(
        self,
        target: Any,
        *,
        probabilities: Any = None,
        labels: Any = None,
        values: Any = None,
        valid: Any = None,
    ) -> int:
        """Add a batch of arrays or tensors; returns how many samples were scored.

        Categorical: ``target`` ``(N, ...)`` class indices (or ``(N, C)`` class
        probabilities for metrics of probabilities), ``probabilities``
        ``(N, C, ...)``, ``labels`` like the indices. Otherwise everything has
        the shape of ``target``. ``valid`` masks entries of ``target``; NaN
        targets and ``ignore_index`` are masked too. Nothing is added when any
        input is refused.
        """
        given = {"probabilities": probabilities, "labels": labels, "continuous": values}
        needed = {spec.input for spec in self._metrics}
        for reads in sorted(needed):
            if given[reads] is None:
                raise ValueError(f"update() needs {ARGUMENTS[reads]}= for the declared metrics")
        batch = GivenViews(self._semantics, target, given, valid, self._num_outputs)
        return self._add(batch)

    def update_logits(self, target: Any, logits: Any, *, valid: Any = None) -> int:
        """Add a batch of raw outputs ``(N, C, ...)``, decoded as ``evaluate()`` decodes them."""
        output, actual = torch.as_tensor(logits).detach(), torch.as_tensor(target)
        if not output.is_floating_point():
            raise ValueError(f"logits must be floating, not {output.dtype}")
        if self.semantics == "categorical" and output.ndim < 2:
            raise ValueError(f"categorical logits must be (N, C, ...), not {tuple(output.shape)}")
        axis = 1 if output.ndim > 1 else 0
        width = output.shape[axis] if output.ndim > 1 else 1
        check_width(width, self._num_outputs)
        mask = target_mask(actual, valid, self._semantics)
        if self.semantics == "categorical" and actual.is_floating_point():
            raise ValueError("categorical targets of logits must be class indices")
        views = Views(self._semantics, output, torch.where(mask, actual, 0), mask)
        check_range(self._semantics, views.target, views.valid, width)
        added = self._add(views)
        self._num_outputs = self._num_outputs if self._num_outputs is not None else width
        return added

    def merge(self, other: StreamingMetrics) -> StreamingMetrics:
        """A new accumulation over the samples of both, independent of either.

        Raises :class:`MetricMergeError` unless both declare the same metrics,
        semantics, labels, outputs, ignore_index and (bernoulli) threshold.
        """
        if not isinstance(other, StreamingMetrics):
            raise MetricMergeError(f"cannot merge with {type(other).__name__}")
        merged = copy.copy(self)
        for name, mine, theirs in self._schema(other):
            if mine != theirs:
                raise MetricMergeError(
                    f"the accumulations differ in {name}: {mine!r} and {theirs!r}"
                )
        if merged._num_outputs is None:
            merged._num_outputs = other._num_outputs
        merged._parts = [copy.deepcopy(part) for part in self._parts]
        for part, theirs in zip(merged._parts, other._parts):
            part.merge(copy.deepcopy(theirs))
        merged._count = self._count + other._count
        return merged

    def finalize(self) -> MetricSnapshot:
        """The values so far; changes nothing and may be called at any time."""
        values, unavailable = {}, []
        for spec, part in zip(self._metrics, self._parts):
            value = part.result() if self._count else None
            if value is None:
                unavailable.append(spec.label)
            else:
                values[spec.label] = float(value)
        return MetricSnapshot(count=self._count, values=values, unavailable=tuple(unavailable))

    def _part(self, index: int, spec: MetricSpec) -> Any:
        accumulator = spec.accumulator()
        if not _stores(accumulator):
            return accumulator
        if not self._materialize:
            raise ValueError(
                f"metrics[{index}] ({spec.id}@v{spec.version}) needs every score; pass "
                "materialize=True to store them (memory grows with the samples)"
            )
        return _Stored(spec)

    def _add(self, batch: Any) -> int:
        valid = batch.valid
        kept = len(batch.target) if valid is None else int(valid.sum())
        if not kept:
            return 0
        for spec, part in zip(self._metrics, self._parts):
            prediction = getattr(batch, spec.input)
            if isinstance(part, BuiltinAccumulator):
                if isinstance(part, F1) and self._num_outputs is not None:
                    width = self._num_outputs if self.semantics == "categorical" else 2
                    part.expect(width, trusted=False)
                if hasattr(part, "update_logits") and isinstance(batch, Views):
                    part.update_logits(batch.target, batch.logits, valid)
                else:
                    part.update(batch.target, prediction, valid)
                continue
            target = batch.target if valid is None else batch.target[valid]
            prediction = prediction if valid is None else prediction[valid]
            part.update(target.cpu().numpy(), prediction.detach().cpu().numpy())
        self._count += kept
        return kept

    def _schema(self, other: StreamingMetrics) -> list[tuple[str, Any, Any]]:
        fields: list[tuple[str, Any, Any]] = [
            ("metrics", [m.state() for m in self._metrics], [m.state() for m in other._metrics]),
            ("semantics", self.semantics, other.semantics),
            ("labels", self._labels, other._labels),
            ("ignore_index", self.ignore_index, other.ignore_index),
            ("stored scores", self.bounded, other.bounded),
        ]
        counts = (self._num_outputs, other._num_outputs)
        if None not in counts or (self._count and other._count):
            fields.append(("num_outputs", *counts))
        if self.semantics == "bernoulli":
            fields.append(("threshold", self.threshold, other.threshold))
        return fields


def is_bounded(spec: MetricSpec) -> bool:
    """Whether a metric's memory does not grow with the samples."""
    return not _stores(spec.accumulator())


def _stores(accumulator: Any) -> bool:
    mergeable = callable(getattr(accumulator, "merge", None))
    return not mergeable or bool(getattr(accumulator, "stores_scores", False))


class _Stored:
    """Keeps a metric's inputs and replays them into a fresh accumulator."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec
        self._chunks: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, target: np.ndarray, prediction: np.ndarray) -> None:
        self._chunks.append((target.copy(), prediction.copy()))

    def merge(self, other: _Stored) -> None:
        self._chunks = self._chunks + other._chunks

    def result(self) -> float | None:
        accumulator = self._spec.accumulator()
        for target, prediction in self._chunks:
            accumulator.update(target, prediction)
        return accumulator.result()
