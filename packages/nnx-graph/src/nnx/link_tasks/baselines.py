"""A scorer of pairs that learns nothing, to compare a model with."""

from __future__ import annotations

import numpy as np
import torch
from nnx.link_tasks.codes import contains


def common_neighbours(edge_index: torch.Tensor, pairs: np.ndarray) -> np.ndarray:
    """How many nodes both ends of each pair ``(K, 2)`` have an edge to, ``(K,)`` float64.

    A node counts once however often its edge is there, and a pair's own ends never do.
    """
    source, target = edge_index.cpu().numpy()
    n = int(max(source.max(initial=0), target.max(initial=0), pairs.max(initial=0))) + 1
    codes = np.unique(source * n + target)
    start = np.searchsorted(codes, np.arange(n + 1) * n)
    degree = np.diff(start)
    # The neighbours of the end that has fewer, looked up among those of the other.
    swap = degree[pairs[:, 0]] > degree[pairs[:, 1]]
    few = np.where(swap, pairs[:, 1], pairs[:, 0])
    many = np.where(swap, pairs[:, 0], pairs[:, 1])
    counts = degree[few]
    row = np.repeat(np.arange(len(pairs)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    neighbour = codes[start[few][row] + offset] % n
    shared = contains(codes, many[row] * n + neighbour)
    shared &= (neighbour != pairs[row, 0]) & (neighbour != pairs[row, 1])
    return np.bincount(row[shared], minlength=len(pairs)).astype(np.float64)
