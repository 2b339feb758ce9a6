"""What step functions of the first releases import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nnx.engine.contexts import TrainStepContext


def finalize_step(loss: torch.Tensor, ctx: TrainStepContext) -> float:
    """:func:`nnx.engine.finalize.finalize_step`, with the loss first."""
    from nnx.engine.finalize import finalize_step as finalize

    return finalize(ctx, loss)
