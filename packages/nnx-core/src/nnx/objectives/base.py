"""What every objective is given, may define and is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from nnx.objectives.terms import ObjectiveResult
from nnx.precision import ResolvedPrecision, full_precision
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.models import Model

NONFINITE_POLICIES = ("fail", "skip")


@dataclass(frozen=True, slots=True)
class ObjectiveContext:
    """What an objective sees of one microbatch.

    The objective is called under the run's autocast, so a reduced run's outputs
    are float16 or bfloat16; ``precision`` is the run's resolved precision.
    """

    model: Model
    batch: Any
    epoch_idx: int
    batch_idx: int
    extra_metrics: Mapping[str, Callable[..., Any]] | None = None
    precision: ResolvedPrecision | None = None

    def full_precision(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in float32 when it is float16 or bfloat16 (differentiable).

        Use it before a loss sums over samples or a record becomes NumPy.
        """
        return full_precision(tensor)


@dataclass(frozen=True, slots=True)
class UpdateEvent:
    """One committed optimizer update, as detached numbers.

    ``update_idx`` counts that optimizer's updates from 1. ``epoch_idx`` and
    ``batch_idx`` are where the window closed, after ``microbatches`` of them.
    ``losses`` are the window's unweighted terms (masked ones are left out) and
    ``loss`` is their weighted sum.
    """

    optimizer: str
    update_idx: int
    epoch_idx: int
    batch_idx: int
    microbatches: int
    losses: Mapping[str, float]
    loss: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", MappingProxyType(dict(self.losses)))


class Objective:
    """Base class of objectives; a plain callable of the same signature is one too.

    ``nonfinite`` decides on a loss or gradient that is NaN or infinite:
    ``"fail"`` raises ``FloatingPointError`` before anything is stepped, ``"skip"``
    drops the window.
    """

    def __init__(self, *, nonfinite: str = "fail") -> None:
        self.nonfinite = check.choice(
            type(self).__name__, "nonfinite", nonfinite, NONFINITE_POLICIES
        )

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        """The terms of one microbatch."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(ctx)")

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse a run this objective cannot train; called before the run is reserved."""

    def after_update(self, events: tuple[UpdateEvent, ...]) -> None:
        """Called once per committed update, after the step and before callbacks see it."""
