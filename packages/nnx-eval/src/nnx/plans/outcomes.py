"""What a plan's checks, probe and fit return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from nnx.errors import NNxError

if TYPE_CHECKING:
    from nnx.nn_model import NNModel
    from nnx.store import NNRun


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem, and the field where it is: ``train.metrics[0]``."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class PlanError(ValueError, TypeError, NNxError):
    """A plan that cannot be fitted; ``diagnostics`` lists every problem that was found."""

    def __init__(self, diagnostics: tuple[Diagnostic, ...]) -> None:
        self.diagnostics = tuple(diagnostics)
        lines = "".join(f"\n  - {problem}" for problem in self.diagnostics)
        super().__init__(f"the plan cannot be fitted:{lines}")


@dataclass(frozen=True, slots=True)
class PlanValidation:
    """Every problem of a plan."""

    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is none."""
        return not self.diagnostics

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the problems are."""
        return tuple(problem.path for problem in self.diagnostics)

    def raise_for_errors(self) -> None:
        """Raise :class:`PlanError` with all of them, if there is one."""
        if self.diagnostics:
            raise PlanError(self.diagnostics)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one batch gave: the raw output in eval mode, and the loss of a training step."""

    output_shape: tuple[int, ...]
    output_dtype: str
    target_shape: tuple[int, ...] | None
    loss: float | None
    n_parameters: int
    n_trainable: int


def _nothing() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SplitMetrics:
    """A split's scores in a run's last epoch; ``reason`` says why there are none.

    ``source`` is ``"epoch"`` for scores over the whole split, ``"last_batch"`` for those
    of the last training batch.
    """

    split: str
    available: bool
    epoch: int | None = None
    source: str | None = None
    values: Mapping[str, float] = field(default_factory=_nothing)
    reason: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))


@dataclass(frozen=True, slots=True)
class FitResult:
    """A trained model, its run, the scores of both splits, and the attempt's id."""

    model: NNModel
    run: NNRun
    metrics: Mapping[str, SplitMetrics]
    attempt_id: str
