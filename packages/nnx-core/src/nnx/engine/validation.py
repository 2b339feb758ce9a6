"""The validation of an epoch: the built-in evaluation or the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnx.engine.contexts import EvalStepContext
from nnx.engine.steps import checked_record
from nnx.prediction.inference import evaluate
from nnx.streaming import run_eval_step
from nnx.streaming.evaluation import is_streaming

if TYPE_CHECKING:
    from nnx.engine.session import FitSession
    from nnx.records import NNEvaluationDataPoint


def validate(session: FitSession) -> NNEvaluationDataPoint | None:
    """This epoch's validation record; ``None`` without a validation loader or evaluator."""
    params, evaluator = session.params, session.plan.request.eval_step_fn
    if params.val_loader is None:
        return None
    if evaluator is None or (session.ranks.world_size > 1 and is_streaming(evaluator)):
        return evaluate(
            session.model,
            params.val_loader,
            extra_metrics=params.extra_metrics,
            metrics=params.metrics,
            combine=session.ranks.merge,
            extra_batches=session.ranks.extra_batches(params.val_loader),
        )
    ctx = EvalStepContext(
        model=session.model,
        val_loader=params.val_loader,
        extra_metrics=params.extra_metrics,
        epoch_idx=session.epoch,
        metrics=params.metrics,
    )
    with session.ranks.evaluating():
        record = checked_record(run_eval_step(evaluator, ctx), "eval_step_fn")
    record = session.ranks.merge_record(record, params.val_loader)
    # A metric that is no mean over samples is derived again from the merged ones.
    complete = getattr(evaluator, "after_merge", None)
    return record if complete is None or session.ranks.world_size == 1 else complete(record)
