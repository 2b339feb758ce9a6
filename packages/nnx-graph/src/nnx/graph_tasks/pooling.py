"""From the rows of nodes to one row per graph."""

from __future__ import annotations

import torch
from nnx.utils import validation as check
from torch import nn
from torch_geometric.nn import aggr

POOLS = ("mean", "sum")
"""Poolings that only average or add."""

ALL_POOLS = (*POOLS, "max", "attention")
"""Every pooling; attention has weights."""


class GraphPool(nn.Module):
    """Pools the node rows of each graph: ``mean``, ``sum`` or ``max``."""

    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.mode = check.choice("GraphPool", "mode", mode, (*POOLS, "max"))
        kinds = {
            "mean": aggr.MeanAggregation, "sum": aggr.SumAggregation, "max": aggr.MaxAggregation,
        }  # fmt: skip
        self._aggregate = kinds[self.mode]()

    def forward(self, x: torch.Tensor, batch: torch.Tensor, num_graphs: int) -> torch.Tensor:
        """``x`` ``(N, F)`` and the graph of each row, ``(N,)``, to ``(num_graphs, F)``."""
        return self._aggregate(x, batch, dim_size=num_graphs)

    def extra_repr(self) -> str:
        return repr(self.mode)


class AttentionPool(nn.Module):
    """A weighted mean of each graph's rows, the weights learned (Li et al., 2016,
    https://arxiv.org/abs/1511.05493)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = aggr.AttentionalAggregation(nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, batch: torch.Tensor, num_graphs: int) -> torch.Tensor:
        return self.attention(x, batch, dim_size=num_graphs)


def pool_of(mode: str, width: int) -> nn.Module:
    """The pooling of that name over rows of ``width`` features."""
    check.choice("graph classifier", "pool", mode, ALL_POOLS)
    return AttentionPool(width) if mode == "attention" else GraphPool(mode)
