"""Bottleneck adapters that the caller composes (Houlsby et al. 2019, arXiv:1902.00751)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from nnx.utils import validation as check
from torch import nn


class AdapterLayer(nn.Module):
    """``y = x + up(act(down(x)))``, the identity when it is built.

    Args:
        dim: features of the input and of the output.
        bottleneck: features in between, usually far fewer.
        activation: called without arguments; returns the activation module.
    """

    def __init__(
        self, dim: int, bottleneck: int, activation: Callable[[], nn.Module] = nn.GELU
    ) -> None:
        dim = check.count("AdapterLayer", "dim", dim)
        bottleneck = check.count("AdapterLayer", "bottleneck", bottleneck)
        super().__init__()
        self.dim = dim
        self.bottleneck = bottleneck
        self.down = nn.Linear(dim, bottleneck)
        self.act = activation()
        self.up = nn.Linear(bottleneck, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def adapter_parameters(self) -> Iterator[nn.Parameter]:
        """All of its parameters: what ``freeze_base=True`` leaves training."""
        return self.parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.act(self.down(x)))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, bottleneck={self.bottleneck}"
