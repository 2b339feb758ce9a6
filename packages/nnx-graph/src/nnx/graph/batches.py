"""What a batch of a graph loader is: nodes, whole graphs, or link candidates."""

from __future__ import annotations

from typing import Any

import torch
from nnx.graph.determinism import check_determinism
from torch import nn


def is_graph_collection_batch(batch: Any) -> bool:
    """Whether the rows of ``batch`` are whole graphs with ids (see :mod:`nnx.graph_tasks`)."""
    return getattr(batch, "graph_id", None) is not None


def is_link_batch(batch: Any) -> bool:
    """Whether ``batch`` asks about candidate links (see :mod:`nnx.link_tasks`)."""
    return any(getattr(batch, n, None) is not None for n in ("candidate_id", "edge_label_index"))


class NodeRows(nn.Module):
    """A net with one output row per node: how it reads a batch, and which rows count."""

    def unpack_batch(self, batch: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """``((x, edge_index), y)`` of a PyG ``Data`` object; ``y`` is ``None`` without targets.

        Raises ``ValueError`` for a batch of whole graphs or of link candidates,
        whose rows are no nodes.
        """
        check_node_batch(batch, type(self).__name__)
        check_determinism(self)
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


def check_node_batch(batch: Any, owner: str) -> None:
    """Refuse what ``owner``, a net with a row per node, cannot read."""
    if is_graph_collection_batch(batch):
        raise ValueError(
            f"{owner} has one output row per node, but this batch holds whole graphs; "
            "classify them with nnx.graph_tasks.graph_classifier_spec(...)"
        )
    if is_link_batch(batch):
        raise ValueError(
            f"{owner} has one output row per node, but this batch asks about links; "
            "train it with a model of nnx.link_tasks.link_predictor_spec(...) and the "
            "objective of its LinkTask"
        )
    if getattr(batch, "x", None) is None or getattr(batch, "edge_index", None) is None:
        raise ValueError(
            f"{owner} expects PyTorch Geometric Data with x and edge_index, "
            f"not {type(batch).__name__}"
        )


def check_seeds(batch: Any) -> int:
    """The number of seeds of a sampled subgraph, whose rows must come first.

    Raises ``ValueError`` where there are more seeds than nodes, or where the nodes were
    reordered: then the first rows are not those of ``seed_id``.
    """
    given = getattr(batch, "batch_size", None)
    seeds, nodes = int(len(batch.input_id) if given is None else given), len(batch.x)
    if not 0 < seeds <= nodes:
        raise ValueError(f"a sampled subgraph of {nodes} nodes cannot have {seeds} seeds")
    wanted = getattr(batch, "seed_id", None)
    if wanted is not None and not torch.equal(batch.n_id[:seeds], wanted):
        raise ValueError(
            "the seeds of this subgraph are not its first rows: its nodes were reordered after "
            "sampling, so the rows to score are unknown. Reorder the graph before sampling"
        )
    return seeds
