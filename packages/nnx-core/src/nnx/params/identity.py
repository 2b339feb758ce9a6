"""The state of a whole run's configuration, and the id that is its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from nnx.params.model import NNModelParams
from nnx.params.net import NNParams
from nnx.params.registered import NNCheckpointTransform
from nnx.params.training import NNTrainerParams, NNTrainParams


def run_state(
    *,
    net: NNParams | None,
    model: NNModelParams,
    train: NNTrainParams,
    trainer: NNTrainerParams | None = None,
    salt: str | None = None,
    transforms: Sequence[NNCheckpointTransform] = (),
) -> dict[str, Any]:
    """A run's configuration as plain data, its ``id`` first."""
    state: dict[str, Any] = {"model": model.state()}
    if net is not None:
        state["net"] = net.state()
    state["train"] = train.state()
    if trainer is not None:
        state["trainer"] = trainer.state()
    if salt is not None:
        state["salt"] = salt
    if transforms:
        state["transforms"] = [transform.state() for transform in transforms]
    return {"id": run_id(state), **state}


def run_id(state: Mapping[str, Any]) -> str:
    """The id of a configuration: the MD5 of its state's ``repr``, the id itself left out.

    The key order of ``state`` counts, so pass what ``state()`` made.
    """
    partial = {key: value for key, value in state.items() if key != "id"}
    return hashlib.md5(str(partial).encode(), usedforsecurity=False).hexdigest()
