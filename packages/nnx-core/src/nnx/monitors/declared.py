"""A run's declared metrics: what they read, and one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nnx.models import Model
from nnx.monitors.views import Views, feed
from nnx.params.registered import MetricSpec
from nnx.tasks.adapters import known_width
from nnx.tasks.semantics import BERNOULLI, CATEGORICAL, Semantics

_NEEDS = {
    "labels": "decoded labels need a classification model",
    "probabilities": (
        "probabilities need a categorical (cross-entropy or NLL) or multilabel "
        "(BCE-with-logits) model"
    ),
    "continuous": "continuous outputs need a regression loss or task",
}


def check_metrics(
    model: Model,
    metrics: Iterable[MetricSpec],
    *,
    owner: str = "metrics",
    computed: bool = True,
    continuable: bool = False,
) -> None:
    """Refuse a metric that is unknown, misconfigured or reads what ``model`` cannot give.

    ``computed=False``: steps of the caller's own report the values, from
    whatever they read. ``continuable``: also refuse a metric whose sums over an
    epoch could not be saved inside it.
    """
    semantics = Semantics.of(model) if computed else None
    check_inputs(metrics, semantics, owner=owner, width=known_width(model) if computed else None)
    if continuable:
        for spec in metrics:
            _refuse_stateless(spec, spec.accumulator())


def check_inputs(
    metrics: Iterable[MetricSpec],
    semantics: Semantics | None,
    *,
    owner: str,
    width: int | None = None,
) -> None:
    """The same for outputs of known semantics, ``width`` of them if that is known.

    Runs no metric code but its config check.
    """
    names: set[str] = set()
    if isinstance(metrics, (MetricSpec, str)):
        raise TypeError(f"{owner} must be a sequence of MetricSpec, not one {metrics!r}")
    for index, spec in enumerate(metrics):
        if not isinstance(spec, MetricSpec):
            raise TypeError(f"{owner}[{index}] must be a MetricSpec, not {spec!r}")
        where = f"{owner}[{index}] ({spec.id}@v{spec.version})"
        if spec.label in names:
            raise ValueError(f"{where}: the name {spec.label!r} is taken; pass name=")
        names.add(spec.label)
        definition = spec.definition
        spec.check()
        if semantics is None:
            continue
        if getattr(definition, "reported", None) is not None:
            raise ValueError(
                f"{where} is not computed by the built-in evaluation; pass "
                f"eval_step_fn={definition.reported}"
            )
        kind = semantics.kind
        if definition.input not in semantics.reads:
            raise ValueError(
                f"{where} reads {definition.input}, which {kind} outputs do not have: "
                f"{_NEEDS[definition.input]}"
            )
        if (spec.id, spec.version) == ("f1", 1):
            average = spec.config.get("average", "macro")
            if kind == CATEGORICAL and average == "binary" and width is not None and width > 2:
                raise ValueError(
                    f"{where}: the F1 of class 1 against class 0 is no score of {width} classes; "
                    'choose the average "macro", "micro" or "weighted"'
                )
            if kind == BERNOULLI and average != "binary":
                raise ValueError(
                    f'{where}: multilabel F1 needs config={{"average": "binary"}}, the F1 of the '
                    f"positive decisions over every output; {average!r} is not available"
                )


class MetricSet:
    """Fresh accumulators of several declared metrics, updated together."""

    def __init__(self, metrics: Sequence[MetricSpec], semantics: Semantics) -> None:
        self.metrics = tuple(metrics)
        self.semantics = semantics
        self._parts = [(spec, spec.input, spec.accumulator()) for spec in self.metrics]

    def update(
        self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add a batch of raw outputs; of a task, its prepared targets and mask."""
        if not self._parts:
            return
        views = Views(self.semantics, output, target, valid)
        for _, reads, accumulator in self._parts:
            feed(accumulator, reads, views, trusted=self.semantics.trusted)

    def values(self) -> dict[str, float]:
        """The value of each metric that has one, by name."""
        found = ((spec.label, part.result()) for spec, _, part in self._parts)
        return {name: float(value) for name, value in found if value is not None}

    def parts(self) -> list[Any]:
        """The accumulators, for :meth:`merge` in another process."""
        for spec, _, part in self._parts:
            if not callable(getattr(part, "merge", None)):
                raise ValueError(
                    f"the metric {spec.label!r} cannot be added up over processes: its "
                    "accumulator has no merge(other)"
                )
        return [part for _, _, part in self._parts]

    def merge(self, parts: Sequence[Any]) -> None:
        """Add another process's :meth:`parts`."""
        for (_, _, mine), theirs in zip(self._parts, parts):
            mine.merge(theirs)

    def state(self) -> list[dict[str, Any]]:
        """The sums of every metric, to continue from."""
        for spec, _, part in self._parts:
            _refuse_stateless(spec, part)
        return [part.state() for _, _, part in self._parts]

    def load_state(self, states: list[dict[str, Any]]) -> None:
        for (_, _, part), state in zip(self._parts, states):
            part.load_state(state)


def _refuse_stateless(spec: MetricSpec, accumulator: Any) -> None:
    if not (hasattr(accumulator, "state") and hasattr(accumulator, "load_state")):
        raise ValueError(
            f"the metric {spec.label!r} cannot be continued in the middle of an epoch: "
            "its accumulator has no state() and load_state(state)"
        )
