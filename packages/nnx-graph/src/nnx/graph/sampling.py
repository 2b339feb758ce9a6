"""Neighbourhoods of nodes, sampled hop by hop, with draws that only the node decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nnx.graph.edges import by_target, checked_edges
from nnx.seeding import isolated_rng
from nnx.utils import validation as check
from nnx.utils.draws import mixed, uniforms

SUBGRAPHS = ("directional", "bidirectional", "induced")


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A sampled subgraph.

    ``nodes`` are global ids, the seeds first, then the nodes of each hop; ``edges``
    is ``(2, m)`` in local ids; ``edge_ids`` are places in the ``edge_index``.
    ``nodes_per_hop`` and ``edges_per_hop`` count what each hop added.
    """

    nodes: np.ndarray
    edges: np.ndarray
    edge_ids: np.ndarray
    nodes_per_hop: tuple[int, ...]
    edges_per_hop: tuple[int, ...]


class NeighborSampler:
    """Samples the neighbourhoods of seed nodes (Hamilton et al., 2017, GraphSAGE).

    ``fanouts[h]`` of the edges into each node that hop ``h`` reached first are drawn,
    uniformly: without replacement (all of them where there are fewer), or with, where
    ``replace``. ``-1`` takes all. What is drawn for a node is a function of ``seed``,
    the epoch and the node: not of the other seeds of the batch, the order of batches,
    the worker or the rank. Two fan-outs draw differently: the smaller draw need not be part
    of the larger.

    ``subgraph`` says which edges a neighbourhood has: the drawn ones
    (``"directional"``), these and their reverses (``"bidirectional"``), or all between
    its nodes (``"induced"``).

    Edges are held sorted by target (16 bytes per edge, 16 per node). The cost of a
    sample grows with what is sampled, not with the graph. A self-loop or a repeated
    edge is an edge like any other.
    """

    def __init__(
        self,
        edge_index: Any,
        num_nodes: int,
        fanouts: Sequence[int],
        *,
        replace: bool = False,
        subgraph: str = "directional",
        seed: int = 0,
    ) -> None:
        owner = type(self).__name__
        self.num_nodes = check.count(owner, "num_nodes", num_nodes)
        self.fanouts = checked_fanouts(owner, "fanouts", fanouts)
        self.replace = check.flag(owner, "replace", replace)
        self.subgraph = check.choice(owner, "subgraph", subgraph, SUBGRAPHS)
        self.seed = check.integer(owner, "seed", seed)
        edges = checked_edges(edge_index, self.num_nodes, owner=owner).cpu()
        self._start, self._source, self._edge = (
            part.numpy() for part in by_target(edges, self.num_nodes)
        )
        self._local: np.ndarray | None = None  # global id -> local id; made where it samples

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_local": None}

    def sample(self, seeds: Any, epoch: int = 0) -> Neighbourhood:
        """The neighbourhood of ``seeds``, distinct node ids, for ``epoch``."""
        seeds = np.ascontiguousarray(seeds, dtype=np.int64)
        if seeds.ndim != 1 or not len(seeds):
            raise ValueError(f"seeds must be one or more node ids, not of shape {seeds.shape}")
        if seeds.min() < 0 or seeds.max() >= self.num_nodes:
            wrong = seeds[(seeds < 0) | (seeds >= self.num_nodes)][0]
            raise ValueError(f"seed {wrong} is no node: there are {self.num_nodes}")
        if self._local is None:
            self._local = np.full(self.num_nodes, -1, dtype=np.int64)
        found = [seeds]
        try:
            return self._sample(seeds, mixed(self.seed, epoch), found)
        finally:
            for nodes in found:
                self._local[nodes] = -1

    def _sample(self, seeds: np.ndarray, key: int, found: list[np.ndarray]) -> Neighbourhood:
        local = self._local
        assert local is not None
        places = np.arange(len(seeds))
        local[seeds] = places
        if (local[seeds] != places).any():
            raise ValueError("seeds must be distinct, but one is there twice")
        frontier, total = seeds, len(seeds)
        sources, targets, edges = [], [], []
        for fanout in self.fanouts:
            counts, positions = self._draw(frontier, fanout, key)
            source = self._source[positions]
            fresh = source[local[source] < 0]
            # Of a node that is met several times, the first meeting gives its place:
            # the last assignment to an index is the one that stays.
            order = np.arange(len(fresh))
            local[fresh[::-1]] = order[::-1]
            new = fresh[local[fresh] == order]
            local[new] = np.arange(total, total + len(new))
            targets.append(np.repeat(np.arange(total - len(frontier), total), counts))
            sources.append(local[source])
            edges.append(self._edge[positions])
            found.append(new)
            frontier, total = new, total + len(new)
        nodes = np.concatenate(found)
        return self._subgraph(
            nodes, np.concatenate(sources), np.concatenate(targets), np.concatenate(edges),
            tuple(map(len, found)), tuple(map(len, edges)),
        )  # fmt: skip

    def _draw(self, nodes: np.ndarray, fanout: int, key: int) -> tuple[np.ndarray, np.ndarray]:
        """How many edges each node gets, and where they are, node by node."""
        start = self._start[nodes]
        degree = self._start[nodes + 1] - start
        if fanout < 0:
            return degree, _ranges(start, degree)
        chosen = degree > 0 if self.replace else degree > fanout
        if not chosen.any():
            counts = np.zeros_like(degree) if self.replace else degree
            return counts, _ranges(start, counts)
        counts = np.where(chosen, fanout, 0 if self.replace else degree)
        positions = _ranges(start, counts)  # right where all edges are taken
        places = (np.cumsum(counts) - counts)[chosen][:, None] + np.arange(fanout)
        drawn = _with_replacement if self.replace else _without_replacement
        offsets = drawn(uniforms(key, nodes[chosen][:, None], np.arange(fanout)), degree[chosen])
        positions[places] = start[chosen][:, None] + offsets
        return counts, positions

    def _subgraph(
        self,
        nodes: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
        edges: np.ndarray,
        nodes_per_hop: tuple[int, ...],
        edges_per_hop: tuple[int, ...],
    ) -> Neighbourhood:
        if self.subgraph == "bidirectional":
            source, target, edges = (
                np.concatenate([source, target]),
                np.concatenate([target, source]),
                np.concatenate([edges, edges]),
            )
            _, first = np.unique(source * len(nodes) + target, return_index=True)
            first.sort()
            source, target, edges = source[first], target[first], edges[first]
        elif self.subgraph == "induced":
            local = self._local
            assert local is not None
            start = self._start[nodes]
            counts = self._start[nodes + 1] - start
            positions = _ranges(start, counts)
            source = local[self._source[positions]]
            inside = source >= 0
            target = np.repeat(np.arange(len(nodes)), counts)[inside]
            source, edges = source[inside], self._edge[positions][inside]
        return Neighbourhood(nodes, np.stack([source, target]), edges, nodes_per_hop, edges_per_hop)


class PygSampler:
    """The same by pyg-lib, for those who have it: what is drawn depends on the batch too.

    Draws are a function of ``seed``, the epoch and the batch's first seed; the global
    random streams do not move. Raises ``ImportError`` where pyg-lib is not installed.
    """

    def __init__(
        self,
        edge_index: Any,
        num_nodes: int,
        fanouts: Sequence[int],
        *,
        replace: bool = False,
        subgraph: str = "directional",
        seed: int = 0,
    ) -> None:
        from torch_geometric import sampler, typing
        from torch_geometric.data import Data

        if not typing.WITH_PYG_LIB:
            raise ImportError(
                'backend="pyg-lib" needs pyg-lib, which is not installed (https://pyg.org says '
                'how, for your torch); backend="nnx" needs nothing'
            )
        self.fanouts = checked_fanouts("PygSampler", "fanouts", fanouts)
        self.replace, self.subgraph, self.seed = replace, subgraph, seed
        edges = checked_edges(edge_index, num_nodes, owner="PygSampler")
        self._theirs = sampler.NeighborSampler(
            Data(edge_index=edges, num_nodes=num_nodes), num_neighbors=list(self.fanouts),
            replace=replace, subgraph_type=subgraph,
        )  # fmt: skip

    def sample(self, seeds: Any, epoch: int = 0) -> Neighbourhood:
        """The neighbourhood of ``seeds``, distinct node ids, for ``epoch``."""
        from torch_geometric.sampler import NodeSamplerInput

        nodes = torch.as_tensor(seeds)
        with isolated_rng(mixed(self.seed, epoch, int(nodes[0])) % (1 << 32)):
            out = self._theirs.sample_from_nodes(NodeSamplerInput(input_id=None, node=nodes))
        order = self._theirs.edge_permutation
        edge_ids = out.edge if order is None else order[out.edge]
        return Neighbourhood(
            out.node.numpy(), torch.stack([out.row, out.col]).numpy(), edge_ids.numpy(),
            tuple(out.num_sampled_nodes), tuple(out.num_sampled_edges),
        )  # fmt: skip


def checked_fanouts(owner: str, field: str, fanouts: Any) -> tuple[int, ...]:
    """Neighbours per hop: counts, or -1 for all."""
    if isinstance(fanouts, (str, bytes)) or not isinstance(fanouts, Sequence) or not len(fanouts):
        check.refuse(owner, field, fanouts, "a list of neighbours per layer, such as [10, 10]")
    values = []
    for i, value in enumerate(fanouts):
        number = check.count(owner, f"{field}[{i}]", value, at_least=-1)
        if number == 0:
            check.refuse(owner, f"{field}[{i}]", value, "a count, or -1 for all neighbours")
        values.append(number)
    return tuple(values)


def _ranges(start: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``start[i], start[i] + 1, ...``, ``counts[i]`` of them, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(start - ends + counts, counts)


def _with_replacement(draws: np.ndarray, degree: np.ndarray) -> np.ndarray:
    return (draws * degree[:, None]).astype(np.int64)


def _without_replacement(draws: np.ndarray, degree: np.ndarray) -> np.ndarray:
    """Distinct offsets below each degree, every subset as likely as any other.

    Floyd's algorithm (Bentley & Floyd, 1987), all nodes at once: step ``i`` draws
    below ``degree - k + i + 1``, and takes the last of these where the draw is taken.
    """
    k = draws.shape[1]
    taken = np.empty((k, len(degree)), dtype=np.int64)
    for i in range(k):
        last = degree - (k - i)
        offset = (draws[:, i] * (last + 1)).astype(np.int64)
        if i:
            repeated = (taken[:i] == offset).any(axis=0)
            offset = np.where(repeated, last, offset)
        taken[i] = offset
    return taken.T


def data_of(data: Any, sample: Neighbourhood, **more: Any) -> Any:
    """The sampled subgraph of a PyG ``Data`` object, with its features.

    Node and edge attributes are selected, others kept; ``n_id``, ``e_id`` and the
    counts per hop are added as PyG's loaders add them.
    """
    from torch_geometric.data import Data

    nodes, edge_ids = torch.from_numpy(sample.nodes), torch.from_numpy(sample.edge_ids)
    part = Data()
    for name, value in data.to_dict().items():
        if name == "edge_index":
            part.edge_index = torch.from_numpy(sample.edges)
        elif isinstance(value, torch.Tensor) and data.is_node_attr(name):
            part[name] = value[nodes.to(value.device)]
        elif isinstance(value, torch.Tensor) and data.is_edge_attr(name):
            part[name] = value[edge_ids.to(value.device)]
        elif name == "num_nodes":
            part.num_nodes = len(nodes)
        else:
            part[name] = value
    part.n_id, part.e_id = nodes, edge_ids
    part.num_sampled_nodes = list(sample.nodes_per_hop)
    part.num_sampled_edges = list(sample.edges_per_hop)
    for name, value in more.items():
        part[name] = value
    return part
