"""Edges as PyTorch Geometric has them: checked once, sorted for sampling."""

from __future__ import annotations

from typing import Any

import torch


def checked_edges(edge_index: Any, num_nodes: int, *, owner: str) -> torch.Tensor:
    """``edge_index`` as an int64 tensor of shape ``(2, M)`` with ends in ``[0, num_nodes)``.

    Raises ``ValueError`` that names the first edge that does not fit.
    """
    edges = edge_index if isinstance(edge_index, torch.Tensor) else torch.as_tensor(edge_index)
    if edges.ndim == 1 and not edges.numel():
        edges = edges.reshape(2, 0).long()
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ValueError(f"{owner}: edge_index must be (2, edges), not {tuple(edges.shape)}")
    if edges.is_floating_point() or edges.is_complex() or edges.dtype == torch.bool:
        raise ValueError(f"{owner}: edge_index must hold integers, not {edges.dtype}")
    edges = edges.long()
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= num_nodes):
        wrong = ((edges < 0) | (edges >= num_nodes)).any(0)
        row = int(wrong.nonzero()[0])
        source, target = edges[:, row].tolist()
        raise ValueError(
            f"{owner}: edge {row} goes from node {source} to node {target}, but there are "
            f"{num_nodes} nodes, 0 to {num_nodes - 1}"
        )
    return edges


def by_target(
    edge_index: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(start, source, edge)``: the edges by their target, in compressed columns.

    The edges into node ``v`` are at ``start[v]`` to ``start[v + 1]``: ``source`` says
    where they come from, ``edge`` their place in ``edge_index``. Edges into one node
    stay in the order of ``edge_index``.
    """
    target = edge_index[1]
    start = torch.zeros(num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(target, minlength=num_nodes), 0, out=start[1:])
    edge = torch.argsort(target, stable=True)
    return start, edge_index[0][edge], edge
