"""Deterministic aggregation, which PyG's layers choose when they are built."""

from __future__ import annotations

import torch
from torch import nn


def check_determinism(net: nn.Module) -> None:
    """Refuse layers that would ignore a determinism that was asked for after them.

    Costs nothing while torch's deterministic algorithms are off.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    if any(getattr(part, "_deterministic", None) is False for part in net.modules()):
        raise ValueError(
            f"this {type(net).__name__} was built before torch's deterministic algorithms were "
            "switched on, and PyTorch Geometric's layers read that once, when they are built: "
            "build the model after set_seed(..., strict=True)"
        )
