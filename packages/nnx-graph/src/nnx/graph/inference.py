"""Exact outputs for every node of a graph too large for one forward pass."""

from __future__ import annotations

from typing import Any

import torch
from nnx.graph.classifier import NodeClassifier
from nnx.graph.edges import checked_edges
from nnx.graph.encoders import GraphEncoder
from nnx.graph.nets import GraphNNBase
from nnx.graph.sampling import NeighborSampler
from nnx.prediction.batches import inference_context
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm


def infer_nodes(model: Any, data: Any, batch_size: int) -> torch.Tensor:
    """The outputs of ``model`` for all nodes of ``data``, ``(N, outputs)`` on the CPU.

    Layer by layer, ``batch_size`` nodes at a time with all of their neighbours: equal to
    the forward pass over the whole graph up to rounding (1e-6), while the model's device
    holds no more than a batch, and memory the rows before and after one layer.

    ``model`` is an ``NNModel`` of a graph net of ``Nets`` or of ``node_classifier_spec``;
    ``data`` a PyG ``Data`` object. Modes and random streams are as before. Raises
    ``TypeError`` for another net and ``ValueError`` for an edge to a node that is not there.
    """
    net = _layered(model.net)
    owner = "infer_nodes"
    size = check.count(owner, "batch_size", batch_size)
    x = data.x.cpu()
    edges = checked_edges(data.edge_index, len(x), owner=owner).cpu()
    attributes = None
    if getattr(net, "takes_edges", False):
        attributes = data.edge_attr.cpu()
    with eval_mode(model.net), inference_context(model):
        for i, layer in enumerate(net.layers):
            x = _layer(net, i, layer, x, edges, attributes, size, model.device)
    return x


def _layer(
    net: Any,
    i: int,
    layer: Any,
    x: torch.Tensor,
    edges: torch.Tensor,
    attributes: torch.Tensor | None,
    size: int,
    device: torch.device,
) -> torch.Tensor:
    """The rows of all nodes after layer ``i``."""
    weights = None
    if isinstance(layer, GCNConv):
        # The weight of an edge depends on the degrees of both ends, which a part of the
        # graph does not show: they are computed on the whole.
        edges, weights = gcn_norm(
            edges, None, len(x), layer.improved, layer.add_self_loops, layer.flow, x.dtype
        )
    sampler = NeighborSampler(edges, len(x), [-1])
    after: torch.Tensor | None = None
    for start in range(0, len(x), size):
        nodes = range(start, min(start + size, len(x)))
        part = sampler.sample(nodes)
        ids = torch.from_numpy(part.edge_ids)
        rows = x[torch.from_numpy(part.nodes)].to(device)
        local = torch.from_numpy(part.edges).to(device)
        if weights is not None:
            made = layer.propagate(local, x=layer.lin(rows), edge_weight=weights[ids].to(device))
            made = made if layer.bias is None else made + layer.bias
        elif attributes is not None:
            made = layer(rows, local, attributes[ids].to(device))
        else:
            made = layer(rows, local)
        made = net.after(i, made[: len(nodes)], rows[: len(nodes)]).cpu()
        if after is None:
            after = made.new_empty(len(x), made.shape[1])
        after[start : start + len(nodes)] = made
    assert after is not None
    return after


def _layered(net: Any) -> Any:
    """What has ``layers`` and ``after`` in a net."""
    found = net.encoder if isinstance(net, NodeClassifier) else net
    if not isinstance(found, (GraphNNBase, GraphEncoder)):
        raise TypeError(
            f"infer_nodes needs a graph net of Nets or of node_classifier_spec, "
            f"not {type(net).__name__}"
        )
    return found
