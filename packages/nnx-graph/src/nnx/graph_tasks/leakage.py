"""Equal graphs, found by their Weisfeiler-Lehman hash."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from nnx.utils.draws import hashed


def graph_hash(graph: Any, *, iterations: int = 3, features: bool = True) -> int:
    """A 64-bit number that is equal for graphs that are equal up to the order of nodes.

    Weisfeiler-Lehman refinement (Shervashidze et al., 2011): a node's colour, at first its
    features (``features=False``: nothing), is mixed ``iterations`` times with the colours
    from which and to which its edges lead. Equal graphs always agree; graphs that the
    refinement cannot tell apart (regular ones, for example) agree too.
    """
    n, edges = len(graph.x), graph.edge_index.cpu().numpy()
    colours = _rows(graph.x) if features else hashed(1, np.zeros(n, dtype=np.int64))
    attributes = getattr(graph, "edge_attr", None)
    of_edge = hashed(2, np.zeros(edges.shape[1], dtype=np.int64))
    if features and attributes is not None:
        of_edge = _rows(attributes.reshape(edges.shape[1], -1))
    for _ in range(iterations):
        incoming = _sums(n, edges[1], hashed(3, colours[edges[0]], of_edge))
        outgoing = _sums(n, edges[0], hashed(4, colours[edges[1]], of_edge))
        colours = hashed(5, colours, incoming, outgoing)
    total = _sums(1, np.zeros(n, dtype=np.int64), hashed(6, colours))
    return int(hashed(7, total, n, edges.shape[1])[0])


def _sums(n: int, index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The sums of 64-bit values by index: the same for any order, as a multiset is."""
    totals = np.zeros(n, dtype=np.uint64)
    np.add.at(totals, index, values)
    return totals


def _rows(values: torch.Tensor) -> np.ndarray:
    """A number per row of features."""
    bits = (values.detach().cpu().double() + 0.0).numpy().view(np.uint64)  # -0 is 0
    colours = hashed(8, np.full(len(bits), bits.shape[1], dtype=np.int64))
    for column in bits.T:
        colours = hashed(9, colours, column)
    return colours
