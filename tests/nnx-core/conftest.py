from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from nnx import NNModelParams, task_adapter


@pytest.fixture
def make_model():
    """What the rooms below the facades know of a model."""

    def make(loss_fn=None, task=None, net=None):
        adapter = None if task is None else task_adapter(task)
        return SimpleNamespace(
            net=net if net is not None else torch.nn.Identity(),
            device=torch.device("cpu"),
            loss_fn=loss_fn if loss_fn is not None else torch.nn.CrossEntropyLoss(),
            batch_adapter=None,
            task_adapter=adapter,
            params=NNModelParams(task=task),
            net_params=None,
        )

    return make
