"""The three graph nets of ``Nets``: GCN, GraphSAGE and GAT, on PyTorch Geometric's layers."""

from __future__ import annotations

import itertools

import torch
from nnx.graph.batches import NodeRows
from nnx.nets.layers import BuiltinNet
from nnx.params import NNParams
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv


class GraphNNBase(NodeRows, BuiltinNet):
    """Message-passing layers ``layers.0`` to ``layers.n`` through ``params.dims``.

    Inputs: node features ``X`` of shape ``(N, input_dim)`` and edges ``E`` of shape
    ``(2, M)``, row 0 the sources, row 1 the targets. Output: raw logits
    ``(N, output_dim)``, one row per node. Hidden layers are followed by their
    activation and dropout, the last by neither.

    A subclass builds its layers in ``_build_layers``.
    """

    export_axes = ({0: "nodes"}, {1: "edges"})  # what another graph has more or fewer of

    def __init__(self, params: NNParams) -> None:
        super().__init__(params)
        self.layers = self._build_layers()

    def _build_layers(self) -> nn.ModuleList:
        raise NotImplementedError(f"{type(self).__name__} must define _build_layers()")

    def forward(self, X: torch.Tensor, E: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            X = self.after(i, layer(X, E), X)
        return X

    def after(self, i: int, made: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
        """What follows layer ``i``, which made ``made`` of ``X``, row by row."""
        return self._activate(i, made) if i < len(self.layers) - 1 else made


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
