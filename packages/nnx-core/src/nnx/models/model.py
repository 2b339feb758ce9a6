"""What the rooms below the facades know of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nnx.models.batches import BatchAdapter
from nnx.params import NNCheckpointTransform, NNModelParams, NNParams, NNSchedulerParams


class Model(Protocol):
    """What trains, scores and predicts: all that the rooms below the facades know of a model.

    :class:`nnx.NNModel` is one. ``task_adapter`` is the declared task's
    :class:`~nnx.tasks.TaskAdapter`, ``None`` without one. ``transforms`` are the recorded
    changes of the net's topology, and ``recorded_topology`` is its :func:`state_topology`
    after the last of them (of a borrowed module, when it was described).
    """

    net: nn.Module
    params: NNModelParams
    net_params: NNParams | None
    loss_fn: nn.Module
    device: torch.device
    batch_adapter: BatchAdapter | None
    transforms: tuple[NNCheckpointTransform, ...]
    recorded_topology: dict[str, tuple[int, ...] | None]
    compiled: Any  # the compiled forward of a fit in progress
    in_training: bool  # whether a fit is in progress

    @property
    def task_adapter(self) -> Any: ...

    @property
    def resolved_precision(self) -> Any: ...

    @property
    def components(self) -> Sequence[Any]: ...

    def split_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]: ...

    def _build_scheduler(
        self,
        optimizer: torch.optim.Optimizer,
        params: NNSchedulerParams,
        horizon: Any,
        monitor: Any = None,
    ) -> Any: ...
