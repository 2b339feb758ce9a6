"""The tail of an imperative step: everything after the loss is known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from nnx.engine.update import UpdateEngine
from nnx.tasks.losses import SupervisedTerms

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext


def finalize_step(ctx: TrainStepContext, loss: torch.Tensor) -> float:
    """Back-propagate ``loss``, clip, step and report one update; the loss as a number.

    For step functions that compute a loss and need nothing special of the update.
    Raises ``FloatingPointError`` before anything is stepped when the loss is not
    finite, and ``ValueError`` for what it cannot honour: a scaler, a reduced
    precision, gradient accumulation. An objective has all of them.
    """
    for obstacle, present in (
        ("an FP16 gradient scaler", ctx.scaler is not None),
        ("a reduced precision", ctx.precision is not None and ctx.precision.reduced),
        ("gradient accumulation", ctx.accumulate_grad_batches != 1),
    ):
        if present:
            raise ValueError(
                f"this training step does not handle {obstacle}. Train in full precision with "
                "accumulate_grad_batches=1, or express the loss as an objective."
            )
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the training loss is {value} at epoch {ctx.epoch_idx}, batch {ctx.batch_idx}; "
            "nothing was back-propagated. Lower the learning rate or clip gradients."
        )
    engine = UpdateEngine(
        {"default": ctx.optimizer},
        clip_norms={"default": ctx.grad_clip_norm},
        net=ctx.model.net,
    )
    engine.apply_supervised(
        SupervisedTerms(loss, loss, None),
        epoch_idx=ctx.epoch_idx,
        batch_idx=ctx.batch_idx,
        is_last=ctx.is_last_batch,
    )
    ctx.report_update()
    return value
