"""Objectives as the step functions of the first releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from nnx.objectives import ObjectiveContext, ObjectiveResult
from nnx.records import NNEvaluationDataPoint

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext


class ImperativeStep:
    """A ``train_step_fn`` that computes an objective's loss and takes its update alone.

    One full-precision update per batch, without accumulation: what a run asks for
    beyond that is refused. The objective itself, where there is one, has all of it.
    ``error_is_loss`` copies the loss into the record's ``error``, for what selects by it.
    """

    full_precision_only = True
    steps_optimizer = True

    def __init__(
        self,
        compute: Callable[[ObjectiveContext], ObjectiveResult],
        *,
        error_is_loss: bool = False,
    ) -> None:
        self._compute = compute
        self._error_is_loss = error_is_loss

    def __call__(self, ctx: TrainStepContext) -> NNEvaluationDataPoint:
        from nnx.engine.finalize import finalize_step

        ctx.optimizer.zero_grad(set_to_none=True)
        result = self._compute(
            ObjectiveContext(
                ctx.model, ctx.batch, ctx.epoch_idx, ctx.batch_idx, ctx.extra_metrics, ctx.precision
            )
        )
        live = [term for term in result.terms if not term.masked]
        if not live:  # every target is masked
            return result.record or NNEvaluationDataPoint()
        parts = [term.scaled(float(term.denominator or 1.0)) for term in live if term.weight]
        loss = finalize_step(ctx, torch.stack([part.reshape(()) for part in parts]).sum())
        record = (result.record or NNEvaluationDataPoint()).with_loss(loss)
        return record.with_error(loss) if self._error_is_loss else record
