"""A model from elsewhere as a run, so that it is shown, generates and is exported like any other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nnx.components import ComponentRegistry
from nnx.enums import Checkpoints
from nnx.params import NNTrainParams
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
from nnx.store import NNCheckpoint, NNRun
from nnx.store.paths import RunPaths
from nnx.utils.weights import fingerprint_of

if TYPE_CHECKING:
    from nnx.lm.model import GenerativeNNModel


def keep_as_run(model: GenerativeNNModel, root: str | None = None) -> NNRun:
    """Store a model as a run without epochs; the same weights are the same run, kept once.

    Its checkpoints "last" and "best" are the model, with its tokenizer. It is not a training
    that could be resumed: train the model, or resume with fresh state from it.
    """
    assert model.net_params is not None
    state = model.net.state_dict()
    run = NNRun(
        net=model.net_params, model=model.params, train=NNTrainParams(n_epochs=1),
        salt=f"imported:{fingerprint_of(state)[:23]}",
    )  # fmt: skip
    if os.path.isfile(RunPaths.of(run.id, root).run_yaml):
        return NNRun.load(run.id, root)
    run.save(root, update_best=False)
    nothing = NNEvaluationDataPoint()
    point = NNCheckpoint(
        net_params=model.net_params, net_state=state, model_params=model.params,
        idp=NNIterationDataPoint(lr=0.0, iter_idx=0, epoch_idx=0, batch_idx=0, train_edp=nothing),
    )  # fmt: skip
    components = ComponentRegistry(model.components).collect()
    for tag in (Checkpoints.LAST, Checkpoints.BEST):
        point.save(run.id, tag, root, components=components)
    return run
