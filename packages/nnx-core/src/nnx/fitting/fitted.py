"""What a fit gives back."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from nnx.enums import Checkpoints
from nnx.fitting.data import Batches
from nnx.nn_model import NNModel
from nnx.params import RuntimeModule
from nnx.plugins import manager, siblings
from nnx.plugins.registry import UnknownIdError
from nnx.seeding import isolated_rng
from nnx.store import NNCheckpoint, NNRun

if TYPE_CHECKING:
    from nnx.prediction import PredictResult
    from nnx.records import NNEvaluationDataPoint

PAGE = "run.page"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Fitted:
    """A trained model and its run.

    ``model`` has the weights that the training ended with; ``best()`` is the model of the
    epoch that scored best. ``evaluate`` and ``predict`` read data as ``nnx.fit`` did.
    """

    model: NNModel
    run: NNRun
    batches: Batches
    val: Iterable[Any] | None = None
    make: Callable[[], nn.Module] | None = None

    def __repr__(self) -> str:
        epochs = self.run.idps[-1].epoch_idx + 1 if self.run.idps else 0
        return f"Fitted({type(self.model.net).__name__}, run {self.run.id}, {epochs} epochs)"

    def best(self) -> Fitted:
        """The same with the model of the run's BEST checkpoint."""
        point = NNCheckpoint.load(self.run.id, Checkpoints.BEST)
        if point is None:
            raise FileNotFoundError(
                f"run {self.run.id} has no BEST checkpoint: no epoch of it had a finite score"
            )
        module = None
        if isinstance(point.model_params.net, RuntimeModule):
            with isolated_rng():  # what it draws is replaced by the checkpoint
                module = copy.deepcopy(self.model.net) if self.make is None else self.make()
        model = NNModel.from_checkpoint(
            point, module=module, batch_adapter=self.model.batch_adapter
        )
        return Fitted(model=model, run=self.run, batches=self.batches, val=self.val, make=self.make)

    def evaluate(self, data: Any | None = None, **options: Any) -> NNEvaluationDataPoint:
        """Scores over every row of ``data``, or of the validation data of the fit.

        ``options`` are those of ``NNModel.evaluate``.
        """
        if data is None and self.val is None:
            raise ValueError("evaluate() needs data: this fit had no validation data")
        loader = self.val if data is None else self.batches.loader(data, "data", shuffle=False)
        assert loader is not None
        return self.model.evaluate(loader, **options)

    def predict(self, X: Any) -> PredictResult:
        """Outputs and decisions for inputs alone: arrays, tensors, a table, a loader."""
        return self.model.predict(self.batches.inputs(X))

    def report(self, path: str | os.PathLike[str] = "report.html") -> str:
        """Write the page about the run to ``path`` and return it (needs nnx-viz)."""
        try:
            write = manager.registry("renderer").resolve(PAGE)
        except UnknownIdError:
            raise ImportError(siblings.how_to_get("Fitted.report", "nnx-viz")) from None
        return str(write([self.run.id], path))
