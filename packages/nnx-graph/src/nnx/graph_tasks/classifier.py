"""Encoder, pooling, head: a classifier of whole graphs, and the recipe that rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.graph.determinism import check_determinism
from nnx.graph.encoders import encoder_config, encoder_of
from nnx.graph_tasks.collection import GraphTaskError, check_graph_batch
from nnx.graph_tasks.pooling import ALL_POOLS, GraphPool, pool_of
from nnx.params import ModelSpec
from nnx.utils import validation as check
from torch import nn

FACTORY_ID = "nnx.graph_classifier"


class GraphClassifier(nn.Module):
    """``encoder(x, edge_index)``, pooled over each graph's nodes, through ``head``.

    ``encoder`` gives one row per node. ``pool`` is a name of :class:`GraphPool`, or a
    module called as ``pool(rows, batch, num_graphs)``. Without a ``head`` the pooled rows
    are the output. ``input_dim``, when given, is the feature width that batches must have.

    Output: ``(G, classes)``, one row per graph; every batch is checked before it runs.
    """

    exportable = False  # to ONNX: the rows to pool depend on the batch, and a trace fixes them

    def __init__(
        self,
        encoder: nn.Module,
        pool: Any = "mean",
        head: nn.Module | None = None,
        *,
        input_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.pool: nn.Module = pool if isinstance(pool, nn.Module) else GraphPool(pool)
        self.head: nn.Module = nn.Identity() if head is None else head
        self.input_dim = (
            None if input_dim is None else check.count("GraphClassifier", "input_dim", input_dim)
        )

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        batch: torch.Tensor,
        ptr: torch.Tensor,
        edge_attr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        more = () if edge_attr is None else (edge_attr,)
        rows = self.encoder(x, edge_index, *more)
        if rows.shape[:1] != x.shape[:1]:
            raise GraphTaskError(
                f"the encoder made {len(rows)} rows of {len(x)} nodes; it must keep one per node"
            )
        return self.head(self.pool(rows, batch, len(ptr) - 1))

    def unpack_batch(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """``((x, edge_index, batch, ptr), y)`` of a checked batch of whole graphs."""
        x, edges, of_node, ptr = check_graph_batch(batch)
        check_determinism(self)
        if self.input_dim is not None and (x.ndim != 2 or x.shape[1] != self.input_dim):
            raise GraphTaskError(
                f"the classifier reads {self.input_dim} features per node, but the batch has "
                f"x of shape {tuple(x.shape)}"
            )
        inputs: tuple[torch.Tensor, ...] = (x, edges, of_node, ptr)
        if getattr(self.encoder, "takes_edges", False):
            attributes = getattr(batch, "edge_attr", None)
            if attributes is None:
                raise GraphTaskError("the encoder reads edge features, but the batch has none")
            inputs = (*inputs, attributes)
        return inputs, getattr(batch, "y", None)

    def sample_ids(self, batch: Any) -> torch.Tensor:
        """The graph ids of a batch, one per output row."""
        return batch.graph_id


def graph_classifier_spec(
    *,
    input_dim: int,
    num_classes: int,
    hidden_dims: Sequence[int] = (32,),
    encoder: Any = "graph_conv",
    pool: str = "mean",
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> ModelSpec:
    """The recipe of a :class:`GraphClassifier`, for ``NNModelParams(net=...)``.

    One layer per entry of ``hidden_dims``, each followed by ``activation`` and
    ``dropout``; then ``pool`` (mean, sum, max, attention) and a linear head.
    ``encoder`` is a kind of :class:`~nnx.graph.EncoderSpec`, or such a spec.
    """
    owner = "graph_classifier_spec"
    config = encoder_config(
        owner, input_dim=input_dim, hidden_dims=hidden_dims, encoder=encoder,
        activation=activation, dropout=dropout,
    )  # fmt: skip
    config["num_classes"] = check.count(owner, "num_classes", num_classes)
    config["pool"] = check.choice(owner, "pool", pool, ALL_POOLS)
    return ModelSpec(FACTORY_ID, 1, config, seed=seed)


def build(config: Mapping[str, Any]) -> GraphClassifier:
    """The factory behind :func:`graph_classifier_spec`."""
    encoder = encoder_of(config, activate_last=True)
    width = encoder.dims[-1]
    return GraphClassifier(
        encoder, pool_of(config["pool"], width), nn.Linear(width, config["num_classes"]),
        input_dim=config["input_dim"],
    )  # fmt: skip
