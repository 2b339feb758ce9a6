"""What nnx-graph contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.plugins.hookspecs import hookimpl


@hookimpl
def nnx_public_names() -> Mapping[str, str]:
    return {
        "GraphAttNN": "nnx.graph.nets:GraphAttNN",
        "GraphConvNN": "nnx.graph.nets:GraphConvNN",
        "GraphNNBase": "nnx.graph.nets:GraphNNBase",
        "GraphSageNN": "nnx.graph.nets:GraphSageNN",
        "NNGraphDataset": "nnx.graph.dataset:NNGraphDataset",
    }


@hookimpl
def nnx_nets() -> Mapping[str, Any]:
    return {
        "graph_att": "nnx.graph.nets:GraphAttNN",
        "graph_conv": "nnx.graph.nets:GraphConvNN",
        "graph_sage": "nnx.graph.nets:GraphSageNN",
    }


@hookimpl
def nnx_model_factories() -> Mapping[tuple[str, int], Any]:
    return {
        ("nnx.graph_classifier", 1): "nnx.graph_tasks.classifier:build",
        ("nnx.hetero_node_classifier", 1): "nnx.graph.hetero:build",
        ("nnx.link_predictor", 1): "nnx.link_tasks.predictor:build",
        ("nnx.node_classifier", 1): "nnx.graph.classifier:build",
    }


@hookimpl
def nnx_metrics() -> Mapping[tuple[str, int], Any]:
    return {
        ("nnx.link_ap", 1): "nnx.link_tasks.monitored:AVERAGE_PRECISION",
        ("nnx.link_auroc", 1): "nnx.link_tasks.monitored:AUROC",
    }


@hookimpl
def nnx_commands() -> Mapping[str, Any]:
    return {"graph": "nnx.graph.commands:graph"}
