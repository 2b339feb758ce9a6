"""What a model's raw outputs mean, said once: as probabilities, as decisions, to a metric.

A declared task or a :class:`ProbabilitySpec` says it; without one the loss
function tells. Decoding, metrics, streams and predictions all read it here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nnx.models import Model
from nnx.params.probability import ProbabilitySpec
from nnx.params.task import TaskSpec
from nnx.tasks import losses
from nnx.tasks.counts import argmax, wide

CATEGORICAL, BERNOULLI, CONTINUOUS, DECODED = "categorical", "bernoulli", "continuous", "decoded"
SEMANTICS = (CATEGORICAL, BERNOULLI, CONTINUOUS)
"""What outputs can be said to mean; "decoded" is what remains of an unknown loss: classes."""

_OF_TASK = {"categorical": CATEGORICAL, "multilabel": BERNOULLI, "regression": CONTINUOUS}
_READS = {
    CATEGORICAL: ("labels", "probabilities"),
    BERNOULLI: ("labels", "probabilities"),
    CONTINUOUS: ("continuous",),
    DECODED: ("labels",),
}


@dataclass(frozen=True, slots=True)
class Semantics:
    """``kind`` is one of :data:`SEMANTICS`, or "decoded".

    ``threshold`` is the probability from which an independent output is on.
    Targets equal to ``ignored`` do not count. ``trusted`` says that no counted
    target lies outside of the classes. ``declared`` is False of what a loss
    function tells: it makes metrics of values possible, and outputs are decided
    as classes all the same.
    """

    kind: str
    threshold: float = 0.5
    ignored: int | None = None
    trusted: bool = False
    declared: bool = True

    @staticmethod
    def of(model: Model) -> Semantics:
        """What a model's task says, or its loss function."""
        adapter = model.task_adapter
        semantics: Semantics = (
            Semantics.of_loss(model.loss_fn) if adapter is None else adapter.semantics
        )
        return semantics

    @staticmethod
    def of_task(task: TaskSpec) -> Semantics:
        """What a declared task says. Its adapter masks the targets, and checks them."""
        return Semantics(_OF_TASK[task.kind], task.threshold, trusted=True)

    @staticmethod
    def of_loss(loss_fn: nn.Module) -> Semantics:
        """What a loss function tells of the outputs that it scores."""
        if isinstance(loss_fn, losses.CLASS_LOSSES):
            native = losses.ignored_index(loss_fn)
            return Semantics(
                CATEGORICAL, ignored=native, trusted=native is not None, declared=False
            )
        if isinstance(loss_fn, nn.BCEWithLogitsLoss):
            return Semantics(BERNOULLI, declared=False)
        continuous = isinstance(loss_fn, losses.CONTINUOUS)
        return Semantics(CONTINUOUS if continuous else DECODED, declared=False)

    @staticmethod
    def of_spec(spec: ProbabilitySpec) -> Semantics:
        """What a probability declaration says."""
        return Semantics(spec.kind)

    @property
    def reads(self) -> tuple[str, ...]:
        """The metric inputs that such outputs have: "labels", "probabilities", "continuous"."""
        return _READS[self.kind]

    @property
    def decides_values(self) -> bool:
        """Whether the outputs are their own decisions."""
        return self.kind == CONTINUOUS and self.declared

    def decide(self, logits: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Class indices (without ``axis``), 0/1 indicators, or the values themselves."""
        if self.kind == BERNOULLI:
            return above_threshold(logits, self.threshold).long()
        return logits if self.decides_values else argmax(logits, axis)

    def probabilities(self, logits: torch.Tensor, axis: int = 1) -> torch.Tensor:
        """Softmax over ``axis`` or independent sigmoids, in double precision."""
        if self.kind not in (CATEGORICAL, BERNOULLI):
            raise ValueError(f"{self.kind} outputs have no probabilities")
        wider = wide(logits)
        return wider.softmax(axis) if self.kind == CATEGORICAL else wider.sigmoid()

    def has_shares(self, target: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether categorical targets are probabilities ``(N, C, ...)``, not class indices."""
        shaped = output.ndim > 1 and target.shape == output.shape
        return self.kind == CATEGORICAL and target.is_floating_point() and shaped

    def harden(self, target: torch.Tensor) -> torch.Tensor:
        """What soft targets decide: the likeliest class, or which outputs are rather on."""
        return argmax(target) if self.kind == CATEGORICAL else (target >= 0.5).long()


def probability_spec(task: TaskSpec) -> ProbabilitySpec | None:
    """A task's outputs as probabilities; ``None`` where they are values."""
    kind = _OF_TASK[task.kind]
    return None if kind == CONTINUOUS else ProbabilitySpec(kind, 1, task.labels)


def above_threshold(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """``sigmoid(logits) >= threshold``, exact at 0.5 and evaluated in double precision."""
    return logits >= 0 if threshold == 0.5 else torch.sigmoid(wide(logits)) >= threshold
