"""A batch's loss as a numerator over a denominator.

A mean over samples stays one under any batching only when it is kept as the
sum of the losses and the weight they are divided by. Computing the weight can
cost a device synchronization, so it is computed when it is read.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nnx.precision import full_precision
from nnx.tasks.batch_error import loss_error

ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss)
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
CONTINUOUS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)

_NLL = (nn.NLLLoss,)
_PER_ELEMENT = (*ELEMENTWISE, nn.BCELoss, nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)


def is_native(loss_fn: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether ``loss_fn`` computes exactly what one of torch's ``kinds`` does.

    A subclass with its own ``forward`` owns its arithmetic and is not one.
    """
    return _is_native(type(loss_fn), kinds)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _is_native(kind: type[nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(issubclass(kind, known) and kind.forward is known.forward for known in kinds)


def ignored_index(loss_fn: nn.Module) -> int | None:
    """The class index that torch's own class losses leave out; ``None`` for other losses."""
    if not is_native(loss_fn, CLASS_LOSSES):
        return None
    index = loss_fn.ignore_index
    assert isinstance(index, int)
    return index


def native_input(loss_fn: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """What ``loss_fn`` takes for raw logits: log-probabilities for the native NLL."""
    if is_native(loss_fn, _NLL):
        return functional.log_softmax(output, dim=1 if output.ndim > 1 else 0)
    return output


class SupervisedTerms:
    """The supervised loss of one batch.

    ``loss`` is the scalar the loss function returns. ``output``, ``target`` and
    ``valid`` are what metrics read (``valid`` is ``None`` where nothing is
    masked by a task). ``weight`` is what ``loss`` was divided by: a float, or a
    0-d tensor where knowing it would synchronize the device; 0 when every
    target is masked, ``None`` for a summed loss. ``denominator`` is the same as
    a float. ``numerator`` is the differentiable sum.
    """

    __slots__ = ("_numerator", "_valid_targets", "_weight", "loss", "output", "target", "valid")

    def __init__(
        self,
        loss: torch.Tensor,
        output: torch.Tensor,
        target: Any,
        valid: torch.Tensor | None = None,
        *,
        numerator: torch.Tensor | None = None,
        weight: Any = None,
        valid_targets: Callable[[], torch.Tensor | float] | None = None,
    ) -> None:
        self.loss, self.output, self.target, self.valid = loss, output, target, valid
        self._numerator, self._weight, self._valid_targets = numerator, weight, valid_targets

    @property
    def weight(self) -> torch.Tensor | float | None:
        if callable(self._weight):
            self._weight = self._weight()
        return self._weight

    @property
    def denominator(self) -> float | None:
        if self.weight is not None:
            self._weight = float(self.weight)
        return self._weight

    @property
    def numerator(self) -> torch.Tensor:
        if self._numerator is None:
            weight = self.denominator
            if weight is None:
                self._numerator = self.loss
            elif weight == 0:  # 0/0 is NaN: a masked batch adds nothing, with a zero gradient
                self._numerator = torch.where(torch.isfinite(self.output), self.output, 0).sum() * 0
            else:
                self._numerator = self.loss * weight
        return self._numerator

    @property
    def masked(self) -> bool:
        """Whether every target is masked: nothing to learn from, no update to take."""
        if self._valid_targets is not None:
            return float(self._valid_targets()) == 0
        if self.denominator is not None:
            return self.denominator == 0
        return self.valid is not None and not bool(self.valid.any())


class Prepared(tuple[torch.Tensor, torch.Tensor, torch.Tensor]):
    """``(output, target, valid)`` of a checked batch, and what one read of the mask told.

    ``complete`` says that every target counts, ``some`` that any does. A fourth and
    a fifth element would not unpack as the three that an adapter promises.
    """

    complete: bool
    some: bool

    def __new__(
        cls,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor,
        *,
        complete: bool | None = None,
        some: bool | None = None,
    ) -> Prepared:
        """What is not told is read from ``valid``, which waits for the device."""
        self = super().__new__(cls, (output, target, valid))
        self.complete = bool(valid.all()) if complete is None else complete
        self.some = bool(valid.any()) if some is None else some
        return self


class Scorer(Protocol):
    """What of a task's adapter checks a batch and computes its loss."""

    def prepare(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def terms(self, loss_fn: nn.Module, prepared: Prepared) -> SupervisedTerms: ...


def supervised_terms(
    loss_fn: nn.Module, adapter: Scorer | None, output: torch.Tensor, target: Any
) -> SupervisedTerms:
    """Check, mask and score one batch's raw ``output`` against its ``target``.

    With a task, ``adapter`` checks the batch first and raises
    ``TaskValidationError``. Without one, the loss function's own rules apply.
    A reduced-precision output is scored in float32.
    """
    output = full_precision(output)
    if adapter is None:
        _refuse_broadcast(loss_fn, output, target)
        try:
            loss = loss_fn(native_input(loss_fn, output), target)
        except (IndexError, RuntimeError, ValueError) as error:
            explained = loss_error(loss_fn, output, target, error)
            if explained is None:
                raise
            raise explained from error
        check_scalar(loss, loss_fn)
        counted = None
        if getattr(loss_fn, "reduction", None) == "sum":
            counted = _valid_counter(loss_fn, target)
        return SupervisedTerms(
            loss,
            output,
            target,
            weight=lambda: loss_weight(loss_fn, output, target),
            valid_targets=counted,
        )
    prepared = adapter.prepare(output, target)
    if not isinstance(prepared, Prepared):  # an adapter of another author gives the three alone
        prepared = Prepared(*prepared)
    terms = adapter.terms(loss_fn, prepared)
    terms.target = prepared[1]  # metrics read masked targets as prepared, not as the loss does
    return terms


def _refuse_broadcast(loss_fn: nn.Module, output: torch.Tensor, target: Any) -> None:
    """(N,) targets under (N, 1) outputs would be compared N x N; torch only warns."""
    if is_native(loss_fn, CONTINUOUS) and getattr(target, "shape", None) != output.shape:
        raise ValueError(
            f"{type(loss_fn).__name__} would broadcast targets of shape "
            f"{tuple(getattr(target, 'shape', ()))} against outputs of shape "
            f"{tuple(output.shape)}; give both one shape"
        )


def check_scalar(loss: torch.Tensor, loss_fn: nn.Module) -> None:
    """Refuse a loss that was not reduced to one number."""
    if loss.ndim:
        raise ValueError(
            f"{type(loss_fn).__name__} returned a loss of shape {tuple(loss.shape)}; "
            "use reduction='mean' or 'sum'"
        )


def loss_weight(
    loss_fn: nn.Module, output: torch.Tensor, target: Any
) -> torch.Tensor | float | None:
    """The weight a mean-reduced loss divides by; ``None`` for a summed one.

    Valid targets or their class weights for cross-entropy and NLL, elements for
    torch's element-wise losses, rows for any other loss.
    """
    if getattr(loss_fn, "reduction", "mean") == "sum":
        return None
    ignored = ignored_index(loss_fn)
    if ignored is not None and isinstance(target, torch.Tensor):
        if target.is_floating_point():  # class probabilities: torch divides by the rows
            return float(output.numel() // output.shape[1 if output.ndim > 1 else 0])
        weight: Any = loss_fn.weight
        if weight is None:
            return count_valid(target, ignored)
        valid = target != ignored
        picked = weight[torch.where(valid, target, 0)]
        return torch.where(valid, picked, 0).sum()
    if is_native(loss_fn, _PER_ELEMENT) and getattr(loss_fn, "reduction", None) == "mean":
        return float(output.numel())
    return float(len(target) if hasattr(target, "__len__") and len(target) else len(output))


def _valid_counter(loss_fn: nn.Module, target: Any) -> Callable[[], torch.Tensor | float] | None:
    """Counts valid targets of a summed class loss, which has no weight to tell it by."""
    ignored = ignored_index(loss_fn)
    if ignored is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    return lambda: count_valid(target, ignored)


def count_valid(target: torch.Tensor, ignored: int) -> torch.Tensor | float:
    """Targets other than ``ignored``. On the CPU NumPy counts in half the time."""
    if target.is_cpu:
        return float(np.count_nonzero(target.detach().numpy() != ignored))
    return (target != ignored).sum()


def with_reduction(loss_fn: nn.Module, reduction: str) -> nn.Module:
    """A shallow copy that reduces another way; ``loss_fn`` keeps its own."""
    other: Any = copy.copy(loss_fn)
    other.reduction = reduction
    return other
