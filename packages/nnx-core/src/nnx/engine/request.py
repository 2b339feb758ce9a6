"""What was asked of a fit, as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnx.engine.optimizer_set import OneOptimizer
from nnx.engine.owner import UpdateOwner

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.models import Model
    from nnx.params import CompileSpec
    from nnx.provenance import ExperimentManifest
    from nnx.store.points import ResumePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRequest:
    """The arguments of ``NNModel.train`` or ``Trainer.train``, nothing resolved yet."""

    model: Model
    params: Any  # NNTrainParams or NNTrainerParams, checked first
    owner: UpdateOwner = field(default_factory=UpdateOwner)
    optimizers: OneOptimizer = field(default_factory=OneOptimizer)
    callbacks: Sequence[Any] | None = None
    eval_step_fn: Callable[[Any], Any] | None = None
    salt: str | None = None
    components: Sequence[Any] | None = None
    provenance: ExperimentManifest | None = None
    history: HistoryJournal | None = None
    compile: CompileSpec | None = None
    distributed: Any = None
    point: ResumePoint | None = None  # what to resume from, where it is no run on disk
    goes_on: bool = False  # whether it resumes a run of this very configuration
