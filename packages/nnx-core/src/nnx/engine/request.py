"""What was asked of a fit, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.nn_model import NNModel
    from nnx.params import CompileSpec
    from nnx.provenance import ExperimentManifest
    from nnx.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The arguments of ``NNModel.train`` or ``Trainer.train``, nothing resolved yet."""

    model: NNModel
    params: Any  # NNTrainParams or NNTrainerParams, checked first
    trainer: Trainer | None = None
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
