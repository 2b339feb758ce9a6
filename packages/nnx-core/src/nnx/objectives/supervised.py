"""The model's own loss as an objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from nnx.objectives.base import Objective, ObjectiveContext
from nnx.objectives.terms import LossTerm, MeanTerm, ObjectiveResult
from nnx.prediction.batches import forward_batch
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.losses import SupervisedTerms, supervised_terms
from nnx.tasks.recorder import score_batch

if TYPE_CHECKING:
    from nnx.models import Model


class SupervisedObjective(Objective):
    """The model's own ``loss_fn`` (or its task's masked loss) as one term, ``"supervised"``.

    The term is normalized by the loss's own denominator (non-ignored targets,
    class weights), or summed for a loss of ``reduction="sum"``.
    """

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        output, target = forward_batch(ctx.model, ctx.batch)
        supervised = score(ctx, output, target)
        return SupervisedResult(supervised_terms_of(supervised), supervised, ctx)


def supervised_objective(*, nonfinite: str = "fail") -> SupervisedObjective:
    """The model's own loss, trained by the shared update engine."""
    return SupervisedObjective(nonfinite=nonfinite)


class SupervisedResult(ObjectiveResult):
    """A result whose record is scored when asked for, all batches of an epoch at once."""

    __slots__ = ("_context", "supervised")

    supervised: SupervisedTerms

    def __init__(
        self, terms: tuple[LossTerm, ...], supervised: SupervisedTerms, context: ObjectiveContext
    ) -> None:
        for name, value in (("terms", terms), ("supervised", supervised), ("_context", context)):
            object.__setattr__(self, name, value)

    @property
    def record(self) -> NNEvaluationDataPoint:
        context: ObjectiveContext = object.__getattribute__(self, "_context")
        return score_batch(
            context.model,
            object.__getattribute__(self, "supervised"),
            loss=self.loss(),
            extra_metrics=context.extra_metrics,
        )


def supervised_terms_of(
    supervised: SupervisedTerms, *, weight: float = 1.0
) -> tuple[LossTerm, ...]:
    """A supervised loss as the term ``"supervised"``; empty when every target is masked."""
    if supervised.masked:
        return ()
    if supervised.denominator is None:
        return (LossTerm("supervised", supervised.loss, None, "sum", weight),)
    return (MeanTerm("supervised", supervised.loss, supervised.denominator, weight),)


def score(ctx: ObjectiveContext, output: torch.Tensor, target: Any) -> SupervisedTerms:
    model = ctx.model
    return supervised_terms(model.loss_fn, model.task_adapter, ctx.full_precision(output), target)


def single_input(model: Model, batch: Any, *, owner: str) -> torch.Tensor:
    """The one positional input of ``batch``, as the model's adapter splits it."""
    args, kwargs, _ = model.split_batch(batch)
    if len(args) != 1 or kwargs:
        raise ValueError(
            f"{owner} needs batches of exactly one positional input, but the model's adapter "
            f"yields {len(args)} positional and {len(kwargs)} keyword inputs"
        )
    return cast(torch.Tensor, args[0])
