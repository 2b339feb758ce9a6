"""What a batch of a graph loader is: nodes, whole graphs, or link candidates."""

from __future__ import annotations

from typing import Any

import torch


def is_graph_collection_batch(batch: Any) -> bool:
    """Whether the rows of ``batch`` are whole graphs with ids (see :mod:`nnx.graph_tasks`)."""
    return getattr(batch, "graph_id", None) is not None


def is_link_batch(batch: Any) -> bool:
    """Whether ``batch`` asks about candidate links (see :mod:`nnx.link_tasks`)."""
    return any(getattr(batch, n, None) is not None for n in ("candidate_id", "edge_label_index"))


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
