"""What the loop hands to the functions that a caller brings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from nnx.engine.update import UpdateEngine
    from nnx.models import Model
    from nnx.params import MetricSpec
    from nnx.precision import ResolvedPrecision
    from nnx.records import NNEvaluationDataPoint


def no_update_listener(*_: Any) -> None:
    """The default of ``report_update``: nobody counts updates outside a run."""


@dataclass(frozen=True, slots=True)
class TrainStepContext:
    """One batch of :meth:`NNModel.train`, for a ``train_step_fn``.

    ``grad_clip_norm``, ``accumulate_grad_batches``, ``scaler`` and ``precision``
    say what the run asks for; a step function that takes its own optimizer step
    honours them and then calls ``report_update()``. ``is_last_batch`` marks the
    end of the epoch, where a short accumulation window closes.
    """

    model: Model
    batch: Any
    optimizer: torch.optim.Optimizer
    scaler: Any
    grad_clip_norm: float | None
    extra_metrics: Mapping[str, Callable[..., Any]] | None
    accumulate_grad_batches: int
    batch_idx: int
    epoch_idx: int
    is_last_batch: bool = False
    accumulation_state: UpdateEngine | None = None
    epoch_summary: Any = None
    precision: ResolvedPrecision | None = None
    report_update: Callable[[], None] = no_update_listener


@dataclass(frozen=True, slots=True)
class EvalStepContext:
    """One epoch's validation, for an ``eval_step_fn``."""

    model: Model
    val_loader: Iterable[Any]
    extra_metrics: Mapping[str, Callable[..., Any]] | None
    epoch_idx: int
    metrics: tuple[MetricSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerStepContext:
    """One batch of :meth:`Trainer.train`, for a ``trainer_step_fn``.

    ``report_update(name)`` says that the optimizer of that name took a step.
    """

    model: Model
    batch: Any
    optimizers: Mapping[str, torch.optim.Optimizer]
    schedulers: Mapping[str, Any]
    extra_metrics: Mapping[str, Callable[..., Any]] | None
    batch_idx: int
    epoch_idx: int
    report_update: Callable[[str], None] = no_update_listener


class TrainStepFn(Protocol):
    """``(TrainStepContext) -> NNEvaluationDataPoint``, called once per batch."""

    def __call__(self, ctx: TrainStepContext, /) -> NNEvaluationDataPoint: ...


class EvalStepFn(Protocol):
    """``(EvalStepContext) -> NNEvaluationDataPoint``, called once per epoch."""

    def __call__(self, ctx: EvalStepContext, /) -> NNEvaluationDataPoint: ...


class TrainerStepFn(Protocol):
    """``(TrainerStepContext) -> NNEvaluationDataPoint``, called once per batch."""

    def __call__(self, ctx: TrainerStepContext, /) -> NNEvaluationDataPoint: ...


def takes_an_argument(listener: Callable[..., Any]) -> bool:
    """Whether ``listener`` can be called with one positional argument."""
    try:
        inspect.signature(listener).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
