"""A classifier of nodes with any encoder, and the recipe that rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.graph.batches import NodeRows
from nnx.graph.encoders import encoder_config, encoder_of
from nnx.params import ModelSpec
from nnx.utils import validation as check
from torch import nn

FACTORY_ID = "nnx.node_classifier"


class NodeClassifier(NodeRows):
    """An encoder whose last layer has one output per class: ``(N, classes)``."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    @property
    def takes_edges(self) -> bool:
        """Whether a batch needs ``edge_attr``."""
        return bool(getattr(self.encoder, "takes_edges", False))

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        edge_attr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if edge_attr is None:
            return self.encoder(x, edge_index)
        return self.encoder(x, edge_index, edge_attr)

    def unpack_batch(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """``((x, edge_index[, edge_attr]), y)`` of a PyG ``Data`` object."""
        inputs, y = super().unpack_batch(batch)
        if not self.takes_edges:
            return inputs, y
        attributes = getattr(batch, "edge_attr", None)
        if attributes is None:
            raise ValueError("the encoder reads edge features, but the graph has no edge_attr")
        return (*inputs, attributes), y


def node_classifier_spec(
    *,
    input_dim: int,
    num_classes: int,
    hidden_dims: Sequence[int] = (32,),
    encoder: Any = "graph_conv",
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> ModelSpec:
    """The recipe of a :class:`NodeClassifier`, for ``NNModelParams(net=...)``.

    One layer per entry of ``hidden_dims``, and one that gives the classes. ``encoder`` is
    a kind of :class:`~nnx.graph.EncoderSpec`, or such a spec.
    """
    owner = "node_classifier_spec"
    config = encoder_config(
        owner, input_dim=input_dim, hidden_dims=hidden_dims, encoder=encoder,
        activation=activation, dropout=dropout,
    )  # fmt: skip
    config["num_classes"] = check.count(owner, "num_classes", num_classes)
    return ModelSpec(FACTORY_ID, 1, config, seed=seed)


def build(config: Mapping[str, Any]) -> NodeClassifier:
    """The factory behind :func:`node_classifier_spec`."""
    return NodeClassifier(encoder_of(config, outputs=config["num_classes"]))
