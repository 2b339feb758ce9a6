"""Edges as integers: canonical, in order, and the edges that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of nodes that may be linked, numbered in lexicographic order.

    Undirected pairs are ``u <= v``; ``loops`` admits ``u == v``. A pair's *code* is
    ``u * n + v``; its *rank* is its place among all admitted pairs.
    """

    n: int
    directed: bool
    loops: bool

    @property
    def count(self) -> int:
        """How many pairs there are."""
        n = self.n
        all_pairs = n * n if self.directed else n * (n + 1) // 2
        return all_pairs - (0 if self.loops else n)

    def canonical(self, edges: np.ndarray) -> np.ndarray:
        """``(m, 2)`` edges with ``u <= v`` where direction does not matter."""
        return edges if self.directed else np.sort(edges, axis=1)

    def codes(self, edges: np.ndarray) -> np.ndarray:
        """The codes of ``(m, 2)`` canonical edges."""
        return edges[:, 0] * self.n + edges[:, 1]

    def edges(self, codes: np.ndarray) -> np.ndarray:
        """The ``(m, 2)`` edges of codes."""
        return np.stack(np.divmod(codes, self.n), axis=1)

    def ranks(self, codes: np.ndarray) -> np.ndarray:
        """The ranks of admitted pairs; they ascend with the codes."""
        u, v = np.divmod(codes, self.n)
        first = self._first(u)
        if self.directed:
            return first + v - (0 if self.loops else (v > u))
        return first + v - u - (0 if self.loops else 1)

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """The codes of ranks."""
        rows = np.arange(self.n + 1)
        u = np.searchsorted(self._first(rows), ranks, side="right") - 1
        rest = ranks - self._first(u)
        if self.directed:
            v = rest if self.loops else rest + (rest >= u)
        else:
            v = rest + u + (0 if self.loops else 1)
        return u * self.n + v

    def absent(self, positions: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """The codes of the ``positions``-th pairs that are not in sorted codes ``taken``."""
        occupied = self.ranks(taken)
        # Free pairs before the i-th taken one: its rank, less the i taken before it.
        free_before = occupied - np.arange(len(occupied))
        return self.at(positions + np.searchsorted(free_before, positions, side="right"))

    def _first(self, u: np.ndarray) -> np.ndarray:
        """The rank of node ``u``'s first pair."""
        if self.directed:
            return u * (self.n if self.loops else self.n - 1)
        return u * (self.n if self.loops else self.n - 1) - u * (u - 1) // 2


def as_array(edges: Any) -> np.ndarray:
    """``(m, 2)`` integers of a sequence of pairs."""
    flat = np.fromiter(chain.from_iterable(edges), dtype=np.int64, count=2 * len(edges))
    return flat.reshape(-1, 2)


def as_edges(array: np.ndarray) -> tuple[Edge, ...]:
    """Pairs of plain integers."""
    return tuple(zip(array[:, 0].tolist(), array[:, 1].tolist()))


def contains(taken: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Which of ``codes`` are among sorted ``taken``."""
    if not len(taken):
        return np.zeros(len(codes), dtype=bool)
    place = np.minimum(np.searchsorted(taken, codes), len(taken) - 1)
    return taken[place] == codes
