"""The state of a whole run's configuration, and the id that is its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from nnx.params.model import NNModelParams
from nnx.params.net import NNParams
from nnx.params.registered import NNCheckpointTransform
from nnx.params.trainer import NNTrainerParams
from nnx.params.training import NNTrainParams


def run_state(
    *,
    net: NNParams | None,
    model: NNModelParams,
    train: NNTrainParams | None,
    trainer: NNTrainerParams | None = None,
    salt: str | None = None,
    transforms: Sequence[NNCheckpointTransform] = (),
) -> dict[str, Any]:
    """A run's configuration as plain data, its ``id`` first.

    Without ``train`` it is not a whole run's, and has no ``id``.
    """
    parts = {"model": model, "net": net, "train": train, "trainer": trainer}
    state: dict[str, Any] = {key: part.state() for key, part in parts.items() if part is not None}
    if salt is not None:
        state["salt"] = salt
    if transforms:
        state["transforms"] = [transform.state() for transform in transforms]
    return state if train is None else {"id": run_id(state), **state}


def run_id(state: Mapping[str, Any]) -> str:
    """The id of a configuration: the MD5 of its state's ``repr``, the id itself left out.

    The key order of ``state`` counts, so pass what ``state()`` made.
    """
    partial = {key: value for key, value in state.items() if key != "id"}
    return hashlib.md5(str(partial).encode(), usedforsecurity=False).hexdigest()
