"""The three graph nets of ``Nets``: GCN, GraphSAGE and GAT, on PyTorch Geometric's layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from nnx.graph.batches import check_node_batch, check_seeds
from nnx.nets.layers import BuiltinNet
from nnx.params import NNParams
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv


class GraphNNBase(BuiltinNet):
    """Message-passing layers ``layers.0`` to ``layers.n`` through ``params.dims``.

    Inputs: node features ``X`` of shape ``(N, input_dim)`` and edges ``E`` of shape
    ``(2, M)``, row 0 the sources, row 1 the targets. Output: raw logits
    ``(N, output_dim)``, one row per node. Hidden layers are followed by their
    activation and dropout, the last by neither.

    A subclass builds its layers in ``_build_layers``.
    """

    def __init__(self, params: NNParams) -> None:
        super().__init__(params)
        self.layers = self._build_layers()

    def _build_layers(self) -> nn.ModuleList:
        raise NotImplementedError(f"{type(self).__name__} must define _build_layers()")

    def forward(self, X: torch.Tensor, E: torch.Tensor) -> torch.Tensor:
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            X = layer(X, E)
            if i < last:
                X = self._activate(i, X)
        return X

    def unpack_batch(self, batch: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """``((x, edge_index), y)`` of a PyG ``Data`` object; ``y`` is ``None`` without targets.

        Raises ``ValueError`` for a batch of whole graphs or of link candidates,
        whose rows are no nodes.
        """
        check_node_batch(batch, type(self).__name__)
        return (batch.x, batch.edge_index), batch.y

    def seed_count(self, batch: Any) -> int | None:
        """How many leading rows of a sampled subgraph are seeds; ``None``: every row counts.

        The neighbours that follow the seeds may belong to another split, so they are
        neither trained on nor scored. Only a sampler's ``input_id`` makes a batch a
        subgraph: a full graph has none, nor has a collation of several graphs, whose
        ``batch_size`` counts graphs.
        """
        if getattr(batch, "input_id", None) is None:
            return None
        return check_seeds(batch)


class GraphConvNN(GraphNNBase):
    """Graph convolutions (Kipf & Welling, 2017, https://arxiv.org/abs/1609.02907)."""

    def _build_layers(self) -> nn.ModuleList:
        return nn.ModuleList(GCNConv(m, n) for m, n in itertools.pairwise(self.params.dims))


class GraphSageNN(GraphNNBase):
    """GraphSAGE with mean aggregation (Hamilton et al., 2017, https://arxiv.org/abs/1706.02216)."""

    def _build_layers(self) -> nn.ModuleList:
        return nn.ModuleList(SAGEConv(m, n) for m, n in itertools.pairwise(self.params.dims))


class GraphAttNN(GraphNNBase):
    """Graph attention (Velickovic et al., 2018, https://arxiv.org/abs/1710.10903).

    Each layer has ``params.n_heads`` heads (1 by default). Those of a hidden layer
    are concatenated, so it is ``n_heads`` times as wide as ``hidden_dims`` says;
    those of the last layer are averaged.
    """

    def _build_layers(self) -> nn.ModuleList:
        heads = self.params.n_heads or 1
        first, *hidden, last = self.params.dims
        layers, width = [], first
        for n in hidden:
            layers.append(GATConv(width, n, heads=heads))
            width = n * heads
        layers.append(GATConv(width, last, heads=heads, concat=False))
        return nn.ModuleList(layers)
