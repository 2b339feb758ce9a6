"""What a batch's outputs decide, and which targets they are compared with.

With a task its adapter decodes. Without one the loss function tells: binary
cross-entropy on logits is thresholded at 0, everything else is a class per
argmax over axis 1. Targets that are no labels (regression values, class
probabilities, soft 0/1 targets) have a loss but nothing to score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from nnx.tasks import losses
from nnx.tasks.counts import argmax

if TYPE_CHECKING:
    from nnx.tasks.adapters import TaskAdapter

CLASSES, INDICATORS, ERRORS, UNSCORED = "classes", "indicators", "errors", "unscored"


@dataclass(slots=True)
class Decoded:
    """One batch's decisions.

    ``predicted`` and ``actual`` are ``(n,)`` class indices, ``(n, L)`` booleans,
    or raw values for ``ERRORS``. Of the targets, those equal to ``ignored`` and
    those not ``valid`` do not count. ``wrong`` is a 0-d flag, left on the device:
    the targets are no labels, so there is nothing to score. ``width`` is the number of classes;
    ``trusted`` says that no counted target lies outside of them.
    """

    mode: str
    predicted: torch.Tensor
    actual: torch.Tensor
    valid: torch.Tensor | None = None
    ignored: int | None = None
    wrong: torch.Tensor | None = None
    width: int = 0
    trusted: bool = True

    def mask(self) -> torch.Tensor | None:
        """The valid targets; ``None`` when all are."""
        if self.ignored is None:
            return self.valid
        kept = self.actual != self.ignored
        return kept if self.valid is None else kept & self.valid


def decode_batch(
    loss_fn: nn.Module,
    adapter: TaskAdapter | None,
    output: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> Decoded:
    """Decode one batch; with a task, ``target`` and ``valid`` are prepared ones."""
    output = output.detach()
    if adapter is None:
        return _decode_by_loss(loss_fn, output, target)
    if adapter.spec.kind == "regression":
        return Decoded(ERRORS, output, target, valid)
    decisions = adapter.decode(output)
    if adapter.spec.kind == "categorical":
        flat = None if valid is None else valid.reshape(-1)
        return Decoded(
            CLASSES, decisions.reshape(-1), target.reshape(-1), flat, width=output.shape[1]
        )
    valid_rows = None if valid is None else as_rows(valid)
    return Decoded(INDICATORS, as_rows(decisions) != 0, as_rows(target) != 0, valid_rows)


def _decode_by_loss(loss_fn: nn.Module, output: torch.Tensor, target: torch.Tensor) -> Decoded:
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        if target.numel() != output.numel():
            raise ValueError(_mismatch(output, target))
        wrong = ((target != 0) & (target != 1)).any()
        if output.ndim == 1 or output.shape[1:].numel() == 1:
            decided = (output.reshape(-1) >= 0).long()
            actual = (target.reshape(-1) != 0).long()
            return Decoded(CLASSES, decided, actual, wrong=wrong, width=2)
        decided = as_rows(output) >= 0
        return Decoded(INDICATORS, decided, as_rows(target.view_as(output)) != 0, wrong=wrong)
    floating = target.is_floating_point()
    if floating and target.numel() == output.numel():
        return Decoded(UNSCORED, output, target)
    if output.ndim < 2 or target.numel() * output.shape[1] != output.numel():
        raise ValueError(_mismatch(output, target))
    actual = target.reshape(-1)
    uneven = (actual != actual.round()).any() if floating else None
    actual = actual.long() if floating else actual
    native = losses.is_native(loss_fn, losses.CLASS_LOSSES)
    return Decoded(
        CLASSES,
        argmax(output).reshape(-1),
        actual,
        ignored=losses.ignored_index(loss_fn),
        wrong=uneven,
        width=output.shape[1],
        trusted=native,
    )


def as_rows(values: torch.Tensor) -> torch.Tensor:
    """``(N, L, ...)`` as ``(rows, L)``: further axes are further rows."""
    return values if values.ndim == 2 else values.movedim(1, -1).reshape(-1, values.shape[1])


def _mismatch(output: torch.Tensor, target: torch.Tensor) -> str:
    return (
        f"targets of shape {tuple(target.shape)} cannot be scored against outputs of shape "
        f"{tuple(output.shape)}: without a task, (N, C, ...) outputs take (N, ...) class indices. "
        "Declare the model's task (NNModelParams(task=TaskSpec...)) or use a step of your own"
    )
