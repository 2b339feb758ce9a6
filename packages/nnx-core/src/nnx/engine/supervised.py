"""The default step: the model's own loss on the update engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.prediction.batches import forward_batch
from nnx.tasks.batch_error import BatchError
from nnx.tasks.losses import SupervisedTerms, supervised_terms

if TYPE_CHECKING:
    import torch

    from nnx.engine.update import UpdateEngine
    from nnx.models import Model
    from nnx.precision import ResolvedPrecision


class Supervised:
    """One batch of the default step, for its record.

    ``loss`` is the batch's loss (``None``: every target masked); ``output``,
    ``target`` and ``valid`` are what scores are made of; ``committed`` says
    whether the optimizer took a step. ``weight`` is what the loss was divided by;
    reading it may synchronize the device.
    """

    __slots__ = ("_terms", "committed", "loss")

    def __init__(self, terms: SupervisedTerms, loss: float | None, committed: bool) -> None:
        self._terms, self.loss, self.committed = terms, loss, committed

    @property
    def output(self) -> torch.Tensor:
        return self._terms.output

    @property
    def target(self) -> Any:
        return self._terms.target

    @property
    def valid(self) -> torch.Tensor | None:
        return self._terms.valid

    @property
    def weight(self) -> float | None:
        return self._terms.denominator


def supervised_step(
    model: Model,
    engine: UpdateEngine,
    batch: Any,
    *,
    precision: ResolvedPrecision,
    is_last: bool,
    epoch_idx: int = 0,
    batch_idx: int = 0,
) -> Supervised:
    """Forward and loss of one batch, then whatever update it completes.

    Raises ``TaskValidationError`` before any backward pass for a batch that does
    not fit the model's task, and ``FloatingPointError`` before anything is stepped
    when the loss is not finite.
    """
    try:
        if precision.reduced:
            with precision.autocast():
                output, target = forward_batch(model, batch)
        else:
            output, target = forward_batch(model, batch)
        # Scored outside the autocast region, in full precision.
        terms = supervised_terms(model.loss_fn, model.task_adapter, output, target)
    except BatchError as error:
        where = f"epoch {epoch_idx}, batch {batch_idx}"
        raise BatchError(f"{where}: {error}") from error.__cause__
    applied = engine.apply_supervised(
        terms, epoch_idx=epoch_idx, batch_idx=batch_idx, is_last=is_last
    )
    return Supervised(terms, applied.value, applied.committed)
