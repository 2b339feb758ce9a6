"""Copies of graphs are found, whatever the order of their nodes."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_graphs import random_edges, small_graphs
from nnx.graph_tasks import GraphCollection, graph_hash
from torch_geometric.data import Data


def relabelled(graph: Data, seed: int) -> Data:
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(seed))
    place = torch.argsort(order)
    edges = place[graph.edge_index]
    shuffled = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(seed + 1))
    return Data(x=graph.x[order], edge_index=edges[:, shuffled])


def test_the_overlap_of_two_collections_names_every_copy():
    graphs = small_graphs()
    train = GraphCollection(graphs[:8], range(8), targets=[0] * 8)
    copies = [relabelled(graphs[2], 1), relabelled(graphs[5], 2), *graphs[8:]]
    test = GraphCollection(copies, range(100, 106), targets=[1] * 6)
    assert train.overlap(test) == [(2, 100), (5, 101)]
    assert test.overlap(train) == [(100, 2), (101, 5)]
    assert train.overlap(GraphCollection(graphs[8:], range(4), targets=[0] * 4)) == []


@given(st.integers(2, 8), st.integers(0, 20), st.integers(0, 10_000))
def test_any_order_of_nodes_and_edges_has_one_hash(nodes, edges, seed):
    generator = torch.Generator().manual_seed(seed)
    graph = Data(
        x=torch.randint(0, 2, (nodes, 3), generator=generator).float(),
        edge_index=random_edges(nodes, edges, seed),
    )
    assert graph_hash(graph) == graph_hash(relabelled(graph, seed))


@given(st.integers(2, 6), st.integers(0, 8), st.integers(0, 2000), st.integers(0, 2000))
def test_graphs_of_equal_hash_are_isomorphic_where_networkx_says_so(nodes, edges, one, other):
    """Small simple graphs: refinement tells apart what is not isomorphic, regular ones aside."""

    def made(seed):
        pairs = {
            tuple(sorted(e)) for e in random_edges(nodes, edges, seed).T.tolist() if e[0] != e[1]
        }
        index = (
            torch.tensor([*pairs, *(e[::-1] for e in pairs)], dtype=torch.int64).reshape(-1, 2).T
        )
        graph = nx.Graph()
        graph.add_nodes_from(range(nodes))
        graph.add_edges_from(pairs)
        return Data(x=torch.zeros(nodes, 1), edge_index=index), graph

    (a, a_graph), (b, b_graph) = made(one), made(other)
    equal = graph_hash(a) == graph_hash(b)
    if nx.is_isomorphic(a_graph, b_graph):
        assert equal
    hashes = [nx.weisfeiler_lehman_graph_hash(g, iterations=6) for g in (a_graph, b_graph)]
    if hashes[0] != hashes[1]:
        assert graph_hash(a, iterations=6) != graph_hash(b, iterations=6)


def test_features_edge_features_and_directions_count():
    graph = Data(x=torch.tensor([[1.0], [2.0]]), edge_index=torch.tensor([[0], [1]]))
    changed = {
        "feature": Data(x=torch.tensor([[1.0], [3.0]]), edge_index=graph.edge_index),
        "direction": Data(x=graph.x, edge_index=graph.edge_index.flip(0)),
        "edge twice": Data(x=graph.x, edge_index=graph.edge_index.repeat(1, 2)),
        "isolated node": Data(x=torch.tensor([[1.0], [2.0], [0.0]]), edge_index=graph.edge_index),
        "edge feature": Data(x=graph.x, edge_index=graph.edge_index, edge_attr=torch.ones(1, 1)),
    }
    for what, other in changed.items():
        assert graph_hash(graph) != graph_hash(other), what
    assert graph_hash(graph, features=False) == graph_hash(changed["feature"], features=False)
    zero, minus = (Data(x=torch.tensor([[v]]), edge_index=torch.empty(2, 0).long())
                   for v in (0.0, -0.0))  # fmt: skip
    assert graph_hash(zero) == graph_hash(minus)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_a_path_and_two_shorter_ones_are_told_apart_when_looked_at_closely(iterations):
    def path(n, start=0):
        forward = torch.stack([torch.arange(n - 1), torch.arange(1, n)]) + start
        return torch.cat([forward, forward.flip(0)], dim=1)

    x = torch.zeros(6, 1)
    one = Data(x=x, edge_index=torch.cat([path(4), path(2, 4)], dim=1))
    two = Data(x=x, edge_index=torch.cat([path(3), path(3, 3)], dim=1))
    equal = graph_hash(one, iterations=iterations) == graph_hash(two, iterations=iterations)
    assert equal == (iterations < 2)
