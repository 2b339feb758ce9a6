"""What a batch's outputs decide, and which targets they are compared with.

With a task its adapter decodes. Without one the loss function tells: binary
cross-entropy on logits is thresholded at 0, everything else is a class per
argmax over axis 1. A soft target (class probabilities, a probability for each
output) is compared by what it decides itself. Targets that are no labels, such as
the values of a regression, have a loss but nothing to score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from nnx.tasks import losses
from nnx.tasks.semantics import BERNOULLI, Semantics

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

    @staticmethod
    def classes(
        decided: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None, *, width: int = 0
    ) -> Decoded:
        """``(N, ...)`` class indices beside their targets.

        Give the ``width`` of the class axis when neither ever lies outside of it.
        """
        flat = None if valid is None else valid.reshape(-1)
        return Decoded(
            CLASSES, decided.reshape(-1), target.reshape(-1), flat, width=width, trusted=width > 0
        )

    @staticmethod
    def indicators(
        decided: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None
    ) -> Decoded:
        """``(N, L, ...)`` 0/1 decisions beside their targets."""
        rows = None if valid is None else as_rows(valid)
        return Decoded(INDICATORS, as_rows(decided) != 0, as_rows(target) != 0, rows)

    @staticmethod
    def values(output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None) -> Decoded:
        """Values beside their targets, of one shape."""
        return Decoded(ERRORS, output, target, valid)

    def mask(self) -> torch.Tensor | None:
        """The valid targets; ``None`` when all are."""
        if self.ignored is None:
            return self.valid
        kept = self.actual != self.ignored
        return kept if self.valid is None else kept & self.valid


class Decoder(Protocol):
    """What of a task's adapter decodes."""

    def decoded(
        self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None
    ) -> Decoded: ...


def decode_batch(
    loss_fn: nn.Module,
    adapter: Decoder | None,
    output: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> Decoded:
    """Decode one batch; with a task, ``target`` and ``valid`` are prepared ones."""
    output = output.detach()
    if adapter is not None:
        return adapter.decoded(output, target, valid)
    return _decode_by_loss(loss_fn, output, target)


def _decode_by_loss(loss_fn: nn.Module, output: torch.Tensor, target: torch.Tensor) -> Decoded:
    if not getattr(loss_fn, "decides", True):
        return Decoded(UNSCORED, output, target)
    semantics = Semantics.of_loss(loss_fn)
    if semantics.kind == BERNOULLI:
        if target.numel() != output.numel():
            raise ValueError(_mismatch(output, target))
        wrong = ~((target >= 0) & (target <= 1)).all()
        on, actual = semantics.decide(output), semantics.harden(target).reshape(output.shape)
        if output.ndim == 1 or output.shape[1:].numel() == 1:
            return Decoded(CLASSES, on.reshape(-1), actual.reshape(-1), wrong=wrong, width=2)
        decoded = Decoded.indicators(on, actual, None)
        decoded.wrong = wrong
        return decoded
    floating = target.is_floating_point()
    if semantics.has_shares(target, output):
        wrong = ~(target >= 0).all()  # NaN or a negative share is no probability
        decided, actual = semantics.decide(output), semantics.harden(target)
        width = output.shape[1]
        return Decoded(CLASSES, decided.reshape(-1), actual.reshape(-1), wrong=wrong, width=width)
    if floating and target.numel() == output.numel():
        return Decoded(UNSCORED, output, target)
    if output.ndim < 2 or target.numel() * output.shape[1] != output.numel():
        raise ValueError(_mismatch(output, target))
    actual = target.reshape(-1)
    uneven = (actual != actual.round()).any() if floating else None
    actual = actual.long() if floating else actual
    return Decoded(
        CLASSES,
        semantics.decide(output).reshape(-1),
        actual,
        ignored=semantics.ignored,
        wrong=uneven,
        width=output.shape[1],
        trusted=losses.is_native(loss_fn, losses.CLASS_LOSSES),
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
