"""The supervised step as a function, for step functions that build on it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from nnx.engine.supervised import supervised_step
from nnx.engine.update import UpdateEngine
from nnx.tasks.recorder import score_batch

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext
    from nnx.records import NNEvaluationDataPoint

# The windows that are open in contexts that carry none, by optimizer.
_open: WeakKeyDictionary[torch.optim.Optimizer, UpdateEngine] = WeakKeyDictionary()


def default_train_step(ctx: TrainStepContext) -> NNEvaluationDataPoint:
    """Forward, loss, backward, and an optimizer step when the window closes.

    Honours the context's gradient clipping, accumulation (exact for uneven
    microbatches; the epoch's last window may be short), scaler and precision, and
    reports the update it takes. Raises ``FloatingPointError`` before anything is
    stepped when the loss is not finite. Call it from a ``train_step_fn`` to add to the
    supervised step instead of replacing it.
    """
    model = ctx.model
    if not model.net.training:
        model.net.train()
    precision = ctx.precision or model.resolved_precision
    engine = _engine(ctx)
    done = supervised_step(
        model, engine, ctx.batch, precision=precision, is_last=ctx.is_last_batch,
        epoch_idx=ctx.epoch_idx, batch_idx=ctx.batch_idx,
    )  # fmt: skip
    record = score_batch(model, done, loss=done.loss, extra_metrics=ctx.extra_metrics)
    if done.committed or ctx.is_last_batch:
        _open.pop(ctx.optimizer, None)  # an engine kept here would keep its optimizer alive
    if done.committed:
        ctx.report_update()
    return record


def _engine(ctx: TrainStepContext) -> UpdateEngine:
    """The context's own window, or a private one for its optimizer; under its knobs."""
    engine = ctx.accumulation_state
    if engine is None or ctx.optimizer not in engine.optimizers.values():
        engine = _open.get(ctx.optimizer)
    if engine is None:
        engine = _open[ctx.optimizer] = UpdateEngine(
            {"default": ctx.optimizer}, scaler=ctx.scaler, net=ctx.model.net
        )
    engine.accumulate = ctx.accumulate_grad_batches
    engine.clip_norms = dict.fromkeys(engine.optimizers, ctx.grad_clip_norm)
    return engine
