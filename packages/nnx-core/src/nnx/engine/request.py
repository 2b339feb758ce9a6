"""What was asked of a fit, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.models import Model
    from nnx.params import CompileSpec
    from nnx.provenance import ExperimentManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The arguments of ``NNModel.train`` or ``Trainer.train``, nothing resolved yet."""

    model: Model
    params: Any  # NNTrainParams or NNTrainerParams, checked first
    trainer: Any = None  # the Trainer that asks, if one does; callbacks see it
    callbacks: Sequence[Any] | None = None
    step_fn: Callable[[Any], Any] | None = None
    eval_step_fn: Callable[[Any], Any] | None = None
    objective: Callable[[Any], Any] | None = None
    salt: str | None = None
    components: Sequence[Any] | None = None
    provenance: ExperimentManifest | None = None
    history: HistoryJournal | None = None
    compile: CompileSpec | None = None
    distributed: Any = None

    @property
    def step_name(self) -> str:
        """What the caller's step argument is called."""
        return "train_step_fn" if self.trainer is None else "trainer_step_fn"
