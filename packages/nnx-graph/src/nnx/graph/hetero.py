"""Node classification on graphs of several kinds of nodes and edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.graph.determinism import check_determinism
from nnx.graph.encoders import EncoderSpec, encoder_config, encoder_of
from nnx.params import ModelSpec
from nnx.utils import validation as check
from torch import nn

FACTORY_ID = "nnx.hetero_node_classifier"
_BIPARTITE = ("graph_sage", "gin", "transformer")
EdgeType = tuple[str, str, str]


class HeteroNodeClassifier(nn.Module):
    """Classes of the nodes of one kind.

    Each kind's features go through a linear map to one width, then through the encoder
    with weights of its own for every kind of edge (PyG's ``to_hetero``; Schlichtkrull et
    al., 2018, https://arxiv.org/abs/1703.06103). Output: ``(N, classes)`` for the nodes of
    ``target``.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        node_dims: Mapping[str, int],
        edge_types: Sequence[EdgeType],
        width: int,
        target: str,
    ) -> None:
        from torch_geometric.nn import to_hetero

        super().__init__()
        self.target = target
        self.inputs = nn.ModuleDict({name: nn.Linear(n, width) for name, n in node_dims.items()})
        self.encoder = to_hetero(encoder, (list(node_dims), list(edge_types)), aggr="sum")

    def forward(
        self, x: Mapping[str, torch.Tensor], edge_index: Mapping[EdgeType, torch.Tensor]
    ) -> torch.Tensor:
        rows = {name: layer(x[name]).relu() for name, layer in self.inputs.items()}
        return self.encoder(rows, dict(edge_index))[self.target]

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, Any], Any]:
        """``((x_dict, edge_index_dict), y)`` of a PyG ``HeteroData`` object."""
        if not hasattr(batch, "node_types"):
            raise ValueError(f"{type(self).__name__} reads HeteroData, not {type(batch).__name__}")
        check_determinism(self)
        return (batch.x_dict, batch.edge_index_dict), getattr(batch[self.target], "y", None)

    def seed_count(self, batch: Any) -> int | None:
        """How many leading nodes of ``target`` are seeds; ``None``: all count."""
        store = batch[self.target]
        return int(store.batch_size) if getattr(store, "input_id", None) is not None else None


def hetero_node_classifier_spec(
    *,
    node_dims: Mapping[str, int],
    edge_types: Sequence[Any],
    target: str,
    num_classes: int,
    hidden_dims: Sequence[int] = (32,),
    encoder: Any = "graph_sage",
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> ModelSpec:
    """The recipe of a :class:`HeteroNodeClassifier`.

    ``node_dims`` are the features of each kind of node, ``edge_types`` the triples
    ``(from, relation, to)``, ``target`` the kind to classify. ``encoder`` is a kind whose
    layers pass messages between kinds: graph_sage, gin, transformer. Mask the nodes of
    other splits by the task's ``ignore_index`` in ``y``.
    """
    owner = "hetero_node_classifier_spec"
    kinds = {check.text(owner, "node_dims", k): check.count(owner, f"node_dims[{k!r}]", v)
             for k, v in node_dims.items()}  # fmt: skip
    edges = [tuple(kind) for kind in edge_types]
    check.choice(owner, "target", target, kinds)
    for kind in edges:
        if len(kind) != 3 or kind[0] not in kinds or kind[2] not in kinds:
            raise ValueError(
                f"{owner}: {kind} must be (from, relation, to), with kinds of node_dims"
            )
    if missing := [name for name in kinds if name not in {to for _, _, to in edges}]:
        raise ValueError(
            f"{owner}: no edge leads to {missing[0]!r} nodes, so they learn nothing from their "
            "neighbours; add reverse edges with torch_geometric.transforms.ToUndirected()"
        )
    spec = EncoderSpec.of(encoder)
    if spec.kind not in _BIPARTITE:
        raise ValueError(
            f"{owner}: {spec.kind} layers take one kind of node; use {', '.join(_BIPARTITE)}"
        )
    if spec.edge_dim is not None:
        raise ValueError(f"{owner}: edge features are not read; leave edge_dim out")
    config = encoder_config(
        owner, input_dim=1, hidden_dims=hidden_dims, encoder=spec, activation=activation,
        dropout=dropout,
    )  # fmt: skip
    config.update(
        input_dim=config["hidden_dims"][0], node_dims=kinds, edge_types=[list(e) for e in edges],
        target=target, num_classes=check.count(owner, "num_classes", num_classes),
    )  # fmt: skip
    return ModelSpec(FACTORY_ID, 1, config, seed=seed)


def build(config: Mapping[str, Any]) -> HeteroNodeClassifier:
    """The factory behind :func:`hetero_node_classifier_spec`."""
    return HeteroNodeClassifier(
        encoder_of(config, outputs=config["num_classes"]), node_dims=config["node_dims"],
        edge_types=[(a, b, c) for a, b, c in config["edge_types"]],
        width=config["input_dim"], target=config["target"],
    )  # fmt: skip
