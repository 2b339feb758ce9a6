"""Declared metrics that can be accumulated apart and merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnx.errors import NNxError
from nnx.monitors.builtin import BuiltinAccumulator
from nnx.monitors.declared import check_inputs
from nnx.monitors.views import BatchViews, feed
from nnx.params.probability import ordered_names
from nnx.params.registered import MetricSpec
from nnx.params.task import TaskSpec
from nnx.streaming.inputs import ARGUMENTS, given_views, logit_views
from nnx.tasks.semantics import SEMANTICS, Semantics
from nnx.utils import validation as check
from nnx.utils.jsonlike import FrozenDict


class MetricMergeError(ValueError, NNxError):
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
        self._labels = None if labels is None else ordered_names(f"{owner}.labels", labels)
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
        check_inputs(
            self._metrics, self._semantics, owner=f"{owner}.metrics", width=self._num_outputs
        )
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

        Categorical: ``target`` ``(N, ...)`` class indices or ``(N, C, ...)`` class
        probabilities, ``probabilities`` ``(N, C, ...)``, ``labels`` ``(N, ...)``.
        Otherwise everything has the shape of ``target``. Metrics of labels read the
        probabilities' decisions where no ``labels`` are given, and compare soft
        targets by what those decide. ``valid`` masks targets; NaN and
        ``ignore_index`` are masked too. Nothing is added when any input is refused
        or a metric raises.
        """
        given = {"probabilities": probabilities, "labels": labels, "continuous": values}
        for reads in sorted({spec.input for spec in self._metrics}):
            derived = reads == "labels" and probabilities is not None
            if given[reads] is None and not derived:
                raise ValueError(f"update() needs {ARGUMENTS[reads]}= for the declared metrics")
        return self._add(given_views(self._semantics, target, given, valid, self._num_outputs))

    def update_logits(self, target: Any, logits: Any, *, valid: Any = None) -> int:
        """Add a batch of raw outputs ``(N, C, ...)``, decoded as ``evaluate()`` decodes them."""
        return self._add(logit_views(self._semantics, target, logits, valid, self._num_outputs))

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
        for spec, part, theirs in zip(self._metrics, merged._parts, other._parts):
            returned = part.merge(copy.deepcopy(theirs))
            if returned is not None and returned is not part:
                raise MetricMergeError(
                    f"the accumulator of {spec.id}@v{spec.version} must merge in place and return "
                    f"None; its merge(other) returned {type(returned).__name__}"
                )
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

    def _add(self, batch: BatchViews) -> int:
        assert batch.valid is not None
        kept = int(batch.valid.sum())
        if not kept:
            return 0
        # A metric that raises must not leave a batch counted in part: all are fed apart first.
        fed = [_apart(part) for part in self._parts]
        last = sorted(zip(self._metrics, fed), key=lambda pair: isinstance(pair[1], _Stored))
        for spec, part in last:
            feed(part, spec.input, batch, trusted=False)
        self._parts, self._count = fed, self._count + kept
        if batch.outputs is not None:
            self._num_outputs = batch.outputs
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


def _apart(part: Any) -> Any:
    """A copy to feed; what only keeps its inputs cannot raise, and is fed last as it is."""
    if isinstance(part, _Stored):
        return part
    return part.copy() if isinstance(part, BuiltinAccumulator) else copy.deepcopy(part)


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
