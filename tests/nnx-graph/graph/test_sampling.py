"""The sampler: exact neighbourhoods and distributions, and draws that only the node decides."""

from __future__ import annotations

import collections
import itertools
import pickle
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_graphs import adam, karate, random_edges
from nnx import Activations, Losses, Nets, NNModel, NNModelParams, NNParams, NNTrainParams, set_seed
from nnx.distributed.partition import RankPartition
from nnx.graph import NeighborBatches, NeighborSampler
from nnx.utils.draws import mixed, uniforms
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput
from torch_geometric.utils import k_hop_subgraph


def edge_list(sample) -> list[tuple[int, int, int]]:
    """Global (source, target, edge id) of a sample's edges."""
    source, target = sample.nodes[sample.edges]
    return sorted(zip(source.tolist(), target.tolist(), sample.edge_ids.tolist()))


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 12))
    ends = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=30))
    seeds = draw(st.lists(ends, min_size=1, max_size=nodes, unique=True))
    return nodes, torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, seeds


@given(graphs(), st.integers(1, 3))
def test_all_neighbours_are_the_k_hop_subgraph(graph, hops):
    """Beside networkx's breadth-first search and PyG's own k_hop_subgraph."""
    nodes, edges, seeds = graph
    sample = NeighborSampler(edges, nodes, [-1] * hops, seed=0).sample(seeds)
    backwards = nx.MultiDiGraph()
    backwards.add_nodes_from(range(nodes))
    backwards.add_edges_from(edges.flip(0).T.tolist())
    reached = {
        node for seed in seeds
        for node in nx.single_source_shortest_path_length(backwards, seed, cutoff=hops)
    }  # fmt: skip
    assert sample.nodes[: len(seeds)].tolist() == seeds
    assert set(sample.nodes.tolist()) == reached
    assert len(sample.nodes) == len(reached)
    inner = NeighborSampler(edges, nodes, [-1] * hops, subgraph="induced").sample(seeds)
    subset, _, _, mask = k_hop_subgraph(seeds, hops, edges, num_nodes=nodes)
    assert set(subset.tolist()) == reached
    assert sorted(inner.edge_ids.tolist()) == mask.nonzero().flatten().tolist()


@given(graphs(), st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3), st.booleans())
def test_a_sample_is_a_part_of_the_graph_in_valid_local_ids(graph, fanouts, replace):
    nodes, edges, seeds = graph
    sampler = NeighborSampler(edges, nodes, fanouts, replace=replace, seed=5)
    sample = sampler.sample(seeds, epoch=2)
    assert len(set(sample.nodes.tolist())) == len(sample.nodes)
    assert [len(seeds), *sample.nodes_per_hop[1:]] == list(sample.nodes_per_hop)
    assert sum(sample.nodes_per_hop) == len(sample.nodes)
    assert sum(sample.edges_per_hop) == len(sample.edge_ids)
    for source, target, edge in edge_list(sample):
        assert [source, target] == edges[:, edge].tolist()
    degree = collections.Counter(edges[1].tolist())
    taken = collections.Counter(sample.nodes[sample.edges[1]].tolist())
    hop_of = np.repeat(np.arange(len(fanouts) + 1), sample.nodes_per_hop)
    for node, hop in zip(sample.nodes.tolist(), hop_of.tolist()):
        if hop == len(fanouts):
            assert taken[node] == 0  # the last hop is reached, not expanded
            continue
        k, d = fanouts[hop], degree[node]
        all_of_them = d if k < 0 or not d else (k if replace else min(k, d))
        assert taken[node] == all_of_them
    if not replace:
        assert len(set(sample.edge_ids.tolist())) == len(sample.edge_ids)


@pytest.mark.parametrize(("degree", "k"), [(5, 2), (4, 3), (6, 1)])
def test_every_subset_of_neighbours_is_as_likely_as_any_other(degree, k):
    edges = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.int64)])
    sampler, draws = NeighborSampler(edges, degree + 1, [k], seed=1), 6000
    seen = collections.Counter(
        tuple(sorted(sampler.sample([0], epoch).edge_ids.tolist())) for epoch in range(draws)
    )
    subsets = len(list(itertools.combinations(range(degree), k)))
    assert len(seen) == subsets
    chi_square = sum((count - draws / subsets) ** 2 / (draws / subsets) for count in seen.values())
    assert chi_square < subsets - 1 + 5 * (2 * (subsets - 1)) ** 0.5


def test_with_replacement_every_neighbour_is_as_likely_in_every_place():
    edges = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    sampler = NeighborSampler(edges, 5, [2], replace=True, seed=1)
    pairs = collections.Counter(
        tuple(sampler.sample([0], epoch).edge_ids.tolist()) for epoch in range(8000)
    )
    assert len(pairs) == 16
    assert all(abs(count - 500) < 110 for count in pairs.values())


def test_what_is_drawn_for_a_node_does_not_depend_on_the_batch():
    edges = random_edges(200, 4000)
    sampler = NeighborSampler(edges, 200, [5, 5], seed=3)

    def first_hop(sample, node):
        return [edge for edge in edge_list(sample) if edge[1] == node]

    together, alone = sampler.sample(range(50), epoch=1), sampler.sample([7], epoch=1)
    assert first_hop(together, 7) == first_hop(alone, 7)
    assert first_hop(sampler.sample([7], epoch=2), 7) != first_hop(alone, 7)
    other = NeighborSampler(edges, 200, [5, 5], seed=4)
    assert first_hop(other.sample([7], epoch=1), 7) != first_hop(alone, 7)
    assert edge_list(pickle.loads(pickle.dumps(sampler)).sample([7], 1)) == edge_list(alone)


def test_the_bidirectional_subgraph_has_each_drawn_edge_and_its_reverse_once():
    edges = random_edges(30, 120)
    forward = NeighborSampler(edges, 30, [3, 3], seed=0).sample([1, 2])
    both = NeighborSampler(edges, 30, [3, 3], seed=0, subgraph="bidirectional").sample([1, 2])
    wanted = {(a, b) for a, b, _ in edge_list(forward)}
    wanted |= {(b, a) for a, b in wanted}
    assert [(a, b) for a, b, _ in edge_list(both)] == sorted(wanted)


def test_the_sampler_leaves_no_trace_after_a_refusal():
    sampler = NeighborSampler(random_edges(20, 100), 20, [2], seed=0)
    before = edge_list(sampler.sample([0, 1]))
    for seeds, message in (([0, 0], "seeds must be distinct"), ([20], "seed 20 is no node"),
                           ([], "one or more node ids")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            sampler.sample(seeds)
    assert edge_list(sampler.sample([0, 1])) == before


def test_large_node_ids_do_not_collide():
    """Ids beyond 32 bits, as keys of draws and as ends of edges."""
    far = 2**33 + np.arange(1000)
    assert len(set(uniforms(1, far).tolist())) == 1000
    assert not np.isclose(uniforms(1, far), uniforms(1, far - 2**33)).any()
    assert mixed(1, 2**40) != mixed(1, 0)
    numbers = uniforms(7, np.arange(100_000))
    assert abs(numbers.mean() - 0.5) < 0.005
    assert 0 <= numbers.min() < numbers.max() < 1


# -- batches ------------------------------------------------------------------------------


def batches(**changes) -> NeighborBatches:
    graph = karate()
    graph.edge_attr = torch.arange(graph.num_edges).float()
    given = {"batch_size": 5, "seed": 2, **changes}
    return NeighborBatches(graph, [3, 2], **given)


def same(a: Data, b: Data) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
        for k in a.keys()  # noqa: SIM118 - a PyG method
    )


def test_a_batch_is_what_pyg_s_loaders_give():
    for batch in batches(nodes=[30, 4, 9, 1, 2, 3]):
        assert isinstance(batch, Data)
        graph = karate()
        assert torch.equal(batch.x, graph.x[batch.n_id])
        assert torch.equal(batch.y, graph.y[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, batch.e_id.float())
        assert torch.equal(torch.tensor([30, 4, 9, 1, 2, 3])[batch.input_id], batch.seed_id)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.seed_id)
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
        assert sum(batch.num_sampled_edges) == batch.num_edges


def test_pyg_s_own_code_accepts_a_batch():
    from torch_geometric.nn import GraphSAGE
    from torch_geometric.utils import trim_to_layer

    batch = next(iter(batches()))
    x, edges, _ = trim_to_layer(
        1, batch.num_sampled_nodes, batch.num_sampled_edges, batch.x, batch.edge_index
    )
    assert x.shape[0] < batch.num_nodes
    assert edges.shape[1] < batch.num_edges
    net = GraphSAGE(34, 8, 2, 4).eval()
    whole = net(batch.x, batch.edge_index)[: batch.batch_size]
    trimmed = net(
        batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
        num_sampled_edges_per_hop=batch.num_sampled_edges,
    )[: batch.batch_size]  # fmt: skip
    torch.testing.assert_close(whole, trimmed)


def test_workers_change_nothing():
    alone = list(batches())
    shared = list(batches(num_workers=2))
    assert len(alone) == len(shared) == len(batches()) == 7
    assert all(same(a, b) for a, b in zip(alone, shared))


def test_each_epoch_has_draws_of_its_own_that_come_again():
    loader = batches()
    first, second = list(loader), list(loader)
    assert not all(same(a, b) for a, b in zip(first, second))
    loader.set_epoch(0)
    assert all(same(a, b) for a, b in zip(first, loader))
    assert all(same(a, b) for a, b in zip(first, loader))  # an announced epoch stays
    loader.set_epoch(1)
    assert all(same(a, b) for a, b in zip(second, loader))


def test_reading_batches_moves_no_global_stream():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(batches())
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()


def test_ranks_share_the_seeds_of_an_epoch(monkeypatch):
    whole = [s for batch in batches(batch_size=8) for s in batch.seed_id.tolist()]
    dealt = []
    for rank in range(2):
        monkeypatch.setattr("nnx.graph.loading.rank_and_world", lambda rank=rank: (rank, 2))
        dealt.append([s for b in batches(batch_size=4) for s in b.seed_id.tolist()])
    assert dealt[0] + dealt[1] != whole
    assert [s for pair in zip(*dealt) for s in pair] == whole
    assert isinstance(batches().partition, RankPartition)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": [3, 3]}, "names a node twice"),
        ({"nodes": [34]}, "names a node outside 0 to 33"),
        ({"nodes": torch.zeros(34, dtype=torch.bool)}, "there is no seed node"),
        ({"nodes": torch.ones(5, dtype=torch.bool)}, "the mask has 5 entries for 34 nodes"),
        ({"nodes": torch.rand(3)}, "integer ids or a mask"),
        ({"batch_size": 0}, "batch_size"),
        ({"subgraph": "any"}, "subgraph must be one of"),
    ],
)
def test_a_loader_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batches(**changes)


def test_pyg_lib_is_used_when_it_is_asked_for_and_there(monkeypatch):
    with pytest.raises(ImportError, match='backend="pyg-lib" needs pyg-lib, .*needs nothing'):
        batches(backend="pyg-lib")
    with pytest.raises(ValueError, match="backend must be one of nnx, pyg-lib"):
        batches(backend="dgl")

    class Theirs:
        """What PyG's sampler answers, with its edges sorted by target, drawn from torch."""

        edge_permutation = karate().edge_index[1].argsort(stable=True)

        def __init__(self, data, num_neighbors, replace, subgraph_type):
            self.data, self.fanouts = data, num_neighbors

        def sample_from_nodes(self, inputs):
            edges = self.data.edge_index
            seed = int(torch.randint(1 << 30, ()))
            made = NeighborSampler(edges, 34, self.fanouts, seed=seed).sample(inputs.node)
            place = self.edge_permutation.argsort()[torch.from_numpy(made.edge_ids)]
            row, col = torch.from_numpy(made.edges)
            return SamplerOutput(
                node=torch.from_numpy(made.nodes), row=row, col=col, edge=place,
                num_sampled_nodes=list(made.nodes_per_hop),
                num_sampled_edges=list(made.edges_per_hop),
            )  # fmt: skip

    monkeypatch.setattr("torch_geometric.typing.WITH_PYG_LIB", True)
    monkeypatch.setattr("torch_geometric.sampler.NeighborSampler", Theirs)
    state = torch.get_rng_state()
    first, again = list(batches(backend="pyg-lib")), list(batches(backend="pyg-lib"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(same(a, b) for a, b in zip(first, again))
    graph = karate()
    for batch in first:
        assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])


# -- training -----------------------------------------------------------------------------


def trained(loader, *, hook=None, params):
    set_seed(0)
    shape = NNParams(input_dim=34, output_dim=4, hidden_dims=[8], dropout_prob=0.2,
                     activation=Activations.RELU)  # fmt: skip
    model = NNModel(net_params=shape, params=NNModelParams(
        net=Nets.GRAPH_SAGE, loss=Losses.CROSS_ENTROPY))  # fmt: skip
    if hook is not None:
        model.net.register_forward_pre_hook(hook)
    given = {"n_epochs": 3, "seed": 1, "train_loader": loader, "optim": adam(), **params}
    return model, model.train(NNTrainParams(**given))


def test_a_run_cut_in_the_middle_of_an_epoch_goes_on_with_the_same_batches():
    """Also when it goes on with another number of workers."""
    whole, _ = trained(batches(), params={"data_id": "whole"})
    calls = []

    def die_in_epoch_1_batch_4(net, inputs):
        calls.append(1)
        if len(calls) == 7 + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(
            batches(), hook=die_in_epoch_1_batch_4,
            params={"data_id": "cut", "checkpoint_every": 2},
        )  # fmt: skip
    (run_id,) = {p.parent.name for p in Path("runs").glob("*/run.yaml")
                 if "data_id: cut" in p.read_text(encoding="utf-8") and p.parent.name != "best"}  # fmt: skip
    resumed, run = trained(
        batches(num_workers=1),
        params={"data_id": "cut", "resume_from_run_id": run_id, "resume_epochs": "planned",
                "resume_from_checkpoint": "step", "resume_mode": "stateful"},
    )  # fmt: skip
    assert len(run.idps) == 2 * 7
    for ours, theirs in zip(resumed.net.parameters(), whole.net.parameters()):
        assert torch.equal(ours, theirs)
