"""The multi-optimizer facade: several named optimizers over one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nnx.engine.contexts import TrainerStepContext, TrainerStepFn
from nnx.engine.fit import fit
from nnx.engine.optimizer_set import NamedOptimizers
from nnx.engine.owner import OwnerKind, UpdateOwner
from nnx.engine.request import FitRequest
from nnx.params import NNTrainerParams, NNTrainerParamsBuilder

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.nn_model import NNModel
    from nnx.provenance import ExperimentManifest
    from nnx.store import NNRun

__all__ = [
    "NNTrainerParams",
    "NNTrainerParamsBuilder",
    "Trainer",
    "TrainerStepContext",
    "TrainerStepFn",
]


class Trainer:
    """Trains one model with several named optimizers: GANs, actor-critic, and the like.

    Each optimizer owns exactly the parameters its ``param_groups`` match.
    """

    def __init__(self, model: NNModel) -> None:
        from nnx.nn_model import NNModel

        if not isinstance(model, NNModel):
            raise TypeError(f"Trainer needs an NNModel, not {type(model).__name__}")
        self.model = model

    def train(
        self,
        params: NNTrainerParams,
        trainer_step_fn: TrainerStepFn | None = None,
        callbacks: Sequence[Any] | None = None,
        salt: str | None = None,
        components: Sequence[Any] | None = None,
        objective: Callable[[Any], Any] | None = None,
        provenance: ExperimentManifest | None = None,
        history: HistoryJournal | None = None,
    ) -> NNRun:
        """Train and return the run, which is on disk under ``runs/<run.id>/``.

        ``trainer_step_fn`` owns every update: it zeroes, back-propagates and steps the
        optimizers it wants, and calls ``ctx.report_update(name)`` after each step. With
        ``objective`` the update engine steps all of them, once per window. There is no
        default step. Raises as ``NNModel.train`` does.
        """
        owner = UpdateOwner.of(trainer_step_fn, objective, step=OwnerKind.TRAINER_STEP)
        return fit(
            FitRequest(
                model=self.model, params=params, owner=owner, optimizers=NamedOptimizers(self),
                callbacks=callbacks, salt=salt, components=components, provenance=provenance,
                history=history,
            )
        )  # fmt: skip
